#include "optim/device_update.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/take.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <halfstep/error.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "kernels/moment_codes.h"
#include "tensor/aten_storage.h"
#include "tensor/dense.h"
#include "tensor/grads_on_device.h"
#include "tensor/param_checks.h"

namespace halfstep::optim {
namespace {

/// The step from which on a schedule's factor no longer changes.
int64_t end_of(const Schedule& schedule) {
  return schedule.shape == Schedule::Shape::Constant ? schedule.spans.warmup_steps
                                                     : schedule.spans.total_steps;
}

bool same(const Schedule& a, const Schedule& b) {
  return a.shape == b.shape && a.spans.warmup_steps == b.spans.warmup_steps &&
         a.spans.total_steps == b.spans.total_steps && a.spans.decay_steps == b.spans.decay_steps &&
         a.spans.final_fraction == b.spans.final_fraction;
}

/// Whether the FP32 weight is a tensor of its own between steps, which the operations may write to.
bool has_fp32_weight(const Slot& slot) {
  return slot.param.storage == WeightStorage::Fp32 || slot.param.storage == WeightStorage::Fp32Master;
}

/// The FP32 weight where there is one. A master is compared with its working copy where LibTorch has noted a
/// change since our last update. What data() changes is not noted; on an accelerator such an edit is not
/// seen.
at::Tensor fp32_weight_of(const Param& param) {
  if (param.storage == WeightStorage::Fp32) return param.working.detach();
  at::Tensor master = param.master;
  if (param.record && param.record->updated_version != param.working._version())
    master.copy_(load_weights_by_aten(param.storage, param.working, master));
  return master;
}

/// Elements that are updated at a time: what is made for them, 4 bytes each and more, is gone before the
/// next.
constexpr int64_t kElementsAtATime = int64_t{1} << 25;

/// A dense tensor's elements as they lie in memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

/// The tensors of many parameters one after the other, and back. There are operations on lists for sums and
/// copies, not for bits: those work on one long tensor.
class Joined {
 public:
  Joined(const std::vector<Slot*>& slots, at::Tensor& (*which)(Slot&)) {
    for (Slot* slot : slots) {
      at::Tensor& tensor = which(*slot);
      if (!tensor.defined()) return;
      parts_.push_back(in_memory_order(tensor));
      sizes_.push_back(tensor.numel());
      shapes_.push_back(tensor);
    }
    values_ = at::cat(parts_);
  }

  const at::Tensor& values() const { return values_; }  // undefined if the slots have none

  /// `flat`, of as many elements, cut into the parameters' shapes and layouts.
  std::vector<at::Tensor> shaped(const at::Tensor& flat) const {
    std::vector<at::Tensor> shaped;
    int64_t offset = 0;
    for (const at::Tensor& shape : shapes_) {
      shaped.push_back(flat.as_strided(shape.sizes(), shape.strides(), offset));
      offset += shape.numel();
    }
    return shaped;
  }

  /// Writes them back to where they came from.
  void put_back(const at::Tensor& flat) { at::_foreach_copy_(parts_, flat.split_with_sizes(sizes_)); }

 private:
  std::vector<at::Tensor> parts_, shapes_;
  std::vector<int64_t> sizes_;
  at::Tensor values_;
};

at::Tensor& working_of(Slot& slot) { return slot.param.working; }
at::Tensor& master_of(Slot& slot) { return slot.param.master; }
at::Tensor& first_of(Slot& slot) { return slot.first.values; }
at::Tensor& second_of(Slot& slot) { return slot.second.values; }

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

void check_for_device(const char* whose, const Slot& slot) {
  HALFSTEP_CHECK(slot.storage != MomentStorage::Blockwise8, whose, ": parameter '", slot.param.name,
                 "' is on ", slot.param.working.device(),
                 ", where moments are FP32 or BF16: LibTorch has no operation for 8-bit codes with a scale "
                 "for each block. Use MomentStorage::Bf16.");
}

template <>
void check_options_for_device(const AdamWOptions&) {}

// A first momentum is the gradient. A buffer of zeros gives that, but for dampening.
template <>
void check_options_for_device(const SgdOptions& options) {
  HALFSTEP_CHECK(options.momentum == 0 || options.dampening == 0, "SGD: dampening is ", options.dampening,
                 "; on an accelerator it is 0: whether a parameter's first step was skipped is known to the "
                 "device alone.");
}

template <typename Options>
DeviceUpdate<Options>::DeviceUpdate(OptimizerState<Options>& state)
    : state_(state), tables_(state.groups.size()) {
  write_counts();
}

template <typename Options>
void DeviceUpdate<Options>::write_counts() {
  const c10::InferenceMode as_for_training(false);
  std::vector<float> counts;
  for (const Slot& slot : state_.slots) counts.push_back(static_cast<float>(slot.steps));
  counts.push_back(0);
  steps_before_counts_ = state_.steps;
  counts_ = at::tensor(counts).to(state_.slots.front().param.working.device());
  issued_ = state_.steps;
}

template <typename Options>
void DeviceUpdate<Options>::read_counts() {
  const at::Tensor counts = counts_.to(at::kCPU);
  const auto* each = counts.const_data_ptr<float>();
  for (std::size_t i = 0; i < state_.slots.size(); ++i) state_.slots[i].steps = static_cast<int64_t>(each[i]);
  state_.steps = steps_before_counts_ + static_cast<int64_t>(each[state_.slots.size()]);
  issued_ = state_.steps;
}

/// `finite` counts 1 or 0; undefined: 1.
template <typename Options>
void DeviceUpdate<Options>::count(const std::vector<bool>& has_grad, const at::Tensor& finite) {
  if (std::find(has_grad.begin(), has_grad.end(), false) == has_grad.end()) {
    finite.defined() ? counts_.add_(finite) : counts_.add_(1);
    return;
  }
  std::vector<at::Tensor> counted = {counts_[counts_.size(0) - 1]};
  for (std::size_t i = 0; i < has_grad.size(); ++i)
    if (has_grad[i]) counted.push_back(counts_[static_cast<int64_t>(i)]);
  finite.defined() ? at::_foreach_add_(counted, finite.to(at::kFloat)) : at::_foreach_add_(counted, 1);
}

template <typename Options>
at::Tensor DeviceUpdate<Options>::count_before(at::ScalarType type) const {
  const at::Tensor count = count_before_.to(type);
  if (steps_before_counts_ == 0) return count;
  return count + (type == at::kInt ? static_cast<std::int32_t>(steps_before_counts_) : steps_before_counts_);
}

template <typename Options>
at::Tensor DeviceUpdate<Options>::scheduled_rate(std::size_t group) {
  const Options& options = state_.groups[group];
  const int64_t end = end_of(options.schedule);
  if (end == 0) return {};
  Table& table = tables_[group];
  if (table.lr != options.lr || !same(table.schedule, options.schedule)) {
    std::vector<float> rates;
    for (int64_t step = 0; step <= end; ++step)
      rates.push_back(static_cast<float>(options.lr * options.schedule.factor(step)));
    table = {.schedule = options.schedule, .lr = options.lr, .source = at::tensor(rates)};
    table.rates = table.source.to(counts_.device(), at::kFloat, /*non_blocking=*/true);
  }
  const at::Tensor index = count_before(at::kLong);
  return at::take(table.rates, issued_ > end ? index.clamp_max(end) : index);
}

template <typename Options>
std::vector<std::vector<Slot*>> DeviceUpdate<Options>::batches() {
  std::vector<std::vector<Slot*>> batches;
  // By storage and type where these need operations of their own: which batch is being filled.
  std::map<std::tuple<WeightStorage, at::ScalarType, MomentStorage, bool>, std::pair<std::size_t, int64_t>>
      filling;
  for (Slot& slot : state_.slots) {
    const at::Tensor& working = slot.param.working;
    if (!working.grad().defined()) continue;
    const auto key = has_fp32_weight(slot) ? std::tuple(WeightStorage::Fp32, at::kFloat, slot.storage,
                                                        slot.first.values.defined())
                                           : std::tuple(slot.param.storage, working.scalar_type(),
                                                        slot.storage, slot.first.values.defined());
    const auto [found, is_new] = filling.try_emplace(key, batches.size(), 0);
    auto& [batch, elements] = found->second;
    if (is_new || elements + working.numel() > kElementsAtATime) {
      batch = batches.size();
      elements = 0;
      batches.emplace_back();
    }
    batches[batch].push_back(&slot);
    elements += working.numel();
  }
  return batches;
}

/// In FP32, laid out as the weights. The operations write what they have divided back: never into the
/// gradient itself.
template <typename Options>
std::vector<at::Tensor> DeviceUpdate<Options>::grads_of(const std::vector<Slot*>& slots, bool will_divide) {
  std::vector<at::Tensor> grads, given, copies;
  for (const Slot* slot : slots) {
    const at::Tensor &working = slot->param.working, grad = working.grad();
    if (grad.scalar_type() == at::kFloat && same_layout(working, grad) && !will_divide) {
      grads.push_back(grad);
      continue;
    }
    given.push_back(grad);
    copies.push_back(at::empty_like(working, working.options().dtype(at::kFloat).requires_grad(false)));
    grads.push_back(copies.back());
  }
  if (!copies.empty()) at::_foreach_copy_(copies, given);
  return grads;
}

template <typename Options>
typename DeviceUpdate<Options>::Batch DeviceUpdate<Options>::Batch::of_group(const std::vector<Slot*>& slots,
                                                                             std::size_t group) const {
  Batch part;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i]->group != group) continue;
    part.weights.push_back(weights[i]);
    part.grads.push_back(grads[i]);
    part.steps.push_back(steps[i]);
    if (!firsts.empty()) part.firsts.push_back(firsts[i]);
    if (!seconds.empty()) part.seconds.push_back(seconds[i]);
  }
  return part;
}

template <typename Options>
void DeviceUpdate<Options>::update_batch(const std::vector<Slot*>& slots,
                                         const std::vector<at::Tensor>& rates, const Skip& skip,
                                         const at::Tensor& divisor, std::uint32_t key) {
  const bool fp32_weights = has_fp32_weight(*slots.front()),
             fp32_moments = slots.front()->storage == MomentStorage::Fp32;
  Batch batch{.grads = grads_of(slots, divisor.defined())};
  for (Slot* slot : slots) {
    batch.steps.push_back(counts_[slot - state_.slots.data()]);
    if (fp32_weights) batch.weights.push_back(fp32_weight_of(slot->param));
    if (fp32_moments) batch.firsts.push_back(slot->first.values);
    if (fp32_moments) batch.seconds.push_back(slot->second.values);
  }
  const auto in_fp32 = [](const Joined& moments) { return moments.values().to(at::kFloat); };

  std::optional<Joined> working, master, first, second;
  at::Tensor weights, firsts, seconds;
  const WeightStorage storage = slots.front()->param.storage;
  if (!fp32_weights) {
    working.emplace(slots, working_of);
    master.emplace(slots, master_of);
    weights = load_weights_by_aten(storage, working->values(), master->values());
    batch.weights = working->shaped(weights);
  }
  if (!fp32_moments) {
    first.emplace(slots, first_of);
    second.emplace(slots, second_of);
    if (first->values().defined()) batch.firsts = first->shaped(firsts = in_fp32(*first));
    if (second->values().defined()) batch.seconds = second->shaped(seconds = in_fp32(*second));
  }

  for (std::size_t group = 0; group < state_.groups.size(); ++group)
    if (Batch part = batch.of_group(slots, group); !part.weights.empty())
      update(state_.groups[group], std::move(part), rates[group], divisor, skip.found_inf);

  if (!fp32_weights) {
    at::Tensor words;
    if (storage == WeightStorage::Stochastic)
      words = random_words(weights.numel(), key, count_before(at::kInt));
    const at::ScalarType low = working->values().scalar_type();
    StoredWeights stored = stored_by_aten(storage, low, weights, words);
    // A compensation of just half a unit may round to the other neighbour, which a skipped step must not do.
    if (storage == WeightStorage::Kahan && skip.finite.defined()) {
      stored.working = at::where(skip.finite, stored.working, working->values());
      stored.master = at::where(skip.finite, stored.master, master->values());
    }
    working->put_back(stored.working);
    if (stored.master.defined()) master->put_back(stored.master);
  }
  if (!fp32_moments && firsts.defined()) {
    // One word for as long as the same parameters have gradients, moved on by the same amount in each step:
    // up and down in fair turns, as in kernels/moment_codes.h. By the parameter's own count: one that is
    // updated in few steps takes its turns too.
    const at::Tensor phases = counts_.to(at::kInt) * static_cast<std::int32_t>(kDitherStep);
    std::vector<at::Tensor> of_slots;
    for (const Slot* slot : slots)
      of_slots.push_back(phases[slot - state_.slots.data()].expand({slot->param.working.numel()}));
    const at::Tensor phase = at::cat(of_slots);
    const at::Tensor word = random_words(firsts.numel(), ~key, at::zeros_like(phases[0]));
    const auto high_half = [](const at::Tensor& words) { return at::bitwise_right_shift(words, 16); };
    first->put_back(rounded_at_random(firsts, at::kBFloat16, high_half(word + phase)));
    if (seconds.defined())
      second->put_back(
          rounded_at_random(seconds, at::kBFloat16, high_half(at::bitwise_left_shift(word, 16).add_(phase))));
  }
  if (fp32_weights) {
    std::vector<at::Tensor> copies, masters;
    for (std::size_t i = 0; i < slots.size(); ++i)
      if (slots[i]->param.storage == WeightStorage::Fp32Master) {
        copies.push_back(slots[i]->param.working.detach());
        masters.push_back(batch.weights[i]);
      }
    if (!copies.empty()) at::_foreach_copy_(copies, masters);
  }
}

template <>
void DeviceUpdate<AdamWOptions>::update(const AdamWOptions& o, Batch batch, const at::Tensor& rate,
                                        const at::Tensor& divisor, const at::Tensor& found_inf) const {
  const auto run = [&](const auto& lr) {
    at::_fused_adamw_(batch.weights, batch.grads, batch.firsts, batch.seconds, {}, batch.steps, lr,
                      o.betas[0], o.betas[1], o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false,
                      if_defined(divisor), if_defined(found_inf));
  };
  rate.defined() ? run(rate) : run(o.lr);
}

template <>
void DeviceUpdate<SgdOptions>::update(const SgdOptions& o, Batch batch, const at::Tensor& rate,
                                      const at::Tensor& divisor, const at::Tensor& found_inf) const {
  const std::vector<at::Tensor> none;
  const auto run = [&](const auto& lr) {
    at::_fused_sgd_(batch.weights, batch.grads, o.momentum == 0 ? none : batch.firsts, o.weight_decay,
                    o.momentum, lr, o.dampening, o.nesterov, /*maximize=*/false, /*is_first_step=*/false,
                    if_defined(divisor), if_defined(found_inf));
  };
  rate.defined() ? run(rate) : run(o.lr);
}

template <typename Options>
bool DeviceUpdate<Options>::step(const GradMultiplier& multiplier) {
  const at::NoGradGuard no_grad;
  Skip skip;
  at::Tensor divisor;
  if (multiplier.grads() && multiplier.grads()->on_device()) {
    skip = {.finite = multiplier.grads()->on_device()->finite,
            .found_inf = multiplier.grads()->on_device()->found_inf};
    divisor = divisor_on_device(multiplier);
  } else if (multiplier.value() != 1) {
    divisor = at::full({}, 1 / multiplier.value(), counts_.options());
  }
  // FP32 counts to 2^24. The optimizer's count goes to the host long before: one wait in millions of steps.
  // Those of the parameters stand still there, where no correction of a moment moves any more.
  if (issued_ - steps_before_counts_ >= int64_t{1} << 22) {
    read_counts();
    write_counts();
  }
  std::vector<bool> has_grad;
  for (const Slot& slot : state_.slots) has_grad.push_back(slot.param.working.grad().defined());
  if (std::find(has_grad.begin(), has_grad.end(), true) == has_grad.end()) return false;

  // Rates go by the count before this step, corrections by the one with it.
  const bool needs_count = std::any_of(state_.slots.begin(), state_.slots.end(), [](const Slot& slot) {
    return slot.param.storage == WeightStorage::Stochastic;
  });
  if (needs_count || std::any_of(state_.groups.begin(), state_.groups.end(),
                                 [](const Options& o) { return end_of(o.schedule) > 0; }))
    count_before_ = counts_[counts_.size(0) - 1].clone();
  std::vector<at::Tensor> rates;
  for (std::size_t group = 0; group < state_.groups.size(); ++group) rates.push_back(scheduled_rate(group));
  count(has_grad, skip.finite);
  auto key = static_cast<std::uint32_t>(state_.seed ^ (state_.seed >> 32));
  for (const auto& slots : batches())
    update_batch(slots, rates, skip, divisor, key = key * 747796405u + slots.front()->id);
  for (std::size_t i = 0; i < state_.slots.size(); ++i)
    if (has_grad[i]) note_update(state_.slots[i].param);
  ++issued_;
  return true;
}

template class DeviceUpdate<AdamWOptions>;
template class DeviceUpdate<SgdOptions>;

}  // namespace halfstep::optim
