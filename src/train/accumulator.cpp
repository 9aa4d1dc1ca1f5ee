#include "train/accumulator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <halfstep/error.h>

#include <limits>
#include <utility>

#include "kernels/update.h"
#include "tensor/dense.h"
#include "tensor/faults.h"
#include "tensor/grads_on_device.h"
#include "tensor/update_path.h"

namespace halfstep::train {

void GradAccumulator::begin_backward(const std::vector<Param>& params) {
  sums_.resize(params.size());
  if (!reducer_) return;
  if (micro_batches_ == 0)
    reducer_->begin_step(params);
  else
    reducer_->begin_micro_batch();
}

void GradAccumulator::add_micro_batch(const std::vector<Param>& params, double loss_scale) {
  const at::NoGradGuard no_grad;
  const GradSummary micro_batch = halfstep::inspect_grads(params, loss_scale);
  if (micro_batch.finite()) {
    add(params, to_add_of(params));
  } else {
    note_bad(micro_batch);
  }
  end_micro_batch(params);
}

std::vector<std::size_t> GradAccumulator::to_add_of(const std::vector<Param>& params) {
  std::vector<std::size_t> having;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = params[i].working.grad();
    if (!grad.defined()) continue;
    if (reducer_ && reducer_->is_sent(i))
      reducer_->add_late(i, grad);
    else
      having.push_back(i);
  }
  return having;
}

void GradAccumulator::end_micro_batch(const std::vector<Param>& params) {
  for (const Param& param : params) param.working.mutable_grad().reset();
  ++micro_batches_;
  if (!reducer_) return;
  reducer_->end_micro_batch(begun());
  // Each micro-batch is a leaf of its own in the tree, or has left.
  if (reducer_->canonical() || reducer_->sends_each_micro_batch())
    for (Sum& sum : sums_) sum.begun_in_step |= std::exchange(sum.begun, false);
}

void GradAccumulator::add_last_of(const std::vector<Param>& params, std::size_t i, double loss_scale) {
  const Param& param = params[i];
  // Its sum has left already: what this region adds stays where it is until backward is through.
  if (!param.working.grad().defined() || reducer_->is_sent(i)) return;
  const at::NoGradGuard no_grad;
  if (kernels_serve(param.working)) {
    const GradSummary found = halfstep::inspect_grads({param}, loss_scale);
    if (!found.finite()) note_bad(found);
    add(params, {i});
  } else {
    add_on_device(params, {i});  // what is not finite is seen in the sum
  }
  param.working.mutable_grad().reset();
  reducer_->ready(i, /*begun=*/true);
}

void GradAccumulator::note_bad(const GradSummary& micro_batch) {
  if (bad_micro_batch_ >= 0) return;
  bad_micro_batch_ = micro_batches_;
  bad_parameter_ = micro_batch.first_bad();
}

std::vector<char> GradAccumulator::begun() const {
  std::vector<char> flags;
  for (const Sum& sum : sums_) flags.push_back(sum.begun);
  return flags;
}

void GradAccumulator::add_micro_batch_on_device(const std::vector<Param>& params,
                                                const at::Tensor& loss_scale) {
  const at::NoGradGuard no_grad;
  on_device_.push_back(inspect_on_device(params, loss_scale, GradDetail::Total));
  add_on_device(params, to_add_of(params));
  end_micro_batch(params);
}

void GradAccumulator::add_on_device(const std::vector<Param>& params, const std::vector<std::size_t>& which) {
  const MemoryClassScope memory(MemoryClass::Gradient);
  sums_.resize(params.size());
  std::vector<at::Tensor> begun, to_add, begins, first;
  for (const std::size_t i : which) {
    const at::Tensor& working = params[i].working;
    make_sum(i, params[i]);
    (sums_[i].begun ? begun : begins).push_back(sums_[i].values);
    (sums_[i].begun ? to_add : first).push_back(working.grad());
    sums_[i].begun = true;
  }
  if (!begins.empty()) at::_foreach_copy_(begins, first);
  if (!begun.empty()) {
    // In two operations: CUDA adds lists of one type in one launch, and lists of two tensor by tensor.
    std::vector<at::Tensor> in_fp32;
    for (const at::Tensor& sum : begun) in_fp32.push_back(at::empty_like(sum));
    at::_foreach_copy_(in_fp32, to_add);
    at::_foreach_add_(begun, in_fp32);
  }
  if (reducer_)
    for (const std::size_t i : which) sums_[i].values = at::Tensor();  // the reducer's, who may let it go
}

GradSummary GradAccumulator::summary_on_device(const std::vector<Param>& params, const at::Tensor& loss_scale,
                                               GradDetail detail) const {
  return inspect_on_device(params, loss_scale, detail, on_device_, first_on_device_, bad_on_any_rank_);
}

void GradAccumulator::read_micro_batches() {
  for (const GradSummary& micro_batch : on_device_) {
    if (!micro_batch.finite() && bad_micro_batch_ < 0) {
      bad_micro_batch_ = first_on_device_;
      bad_parameter_ = micro_batch.first_bad();
    }
    ++first_on_device_;
  }
  on_device_.clear();
}

GradSummary GradAccumulator::bad_summary(double loss_scale) const {
  return GradSummary({.finite = false,
                      .any = true,
                      .norm = std::numeric_limits<double>::quiet_NaN(),
                      .loss_scale = loss_scale,
                      .first_bad = bad_parameter_,
                      .micro_batch = bad_micro_batch_});
}

void GradAccumulator::make_sum(std::size_t i, const Param& param) {
  Sum& sum = sums_[i];
  const at::Tensor& working = param.working;
  if (reducer_) sum.values = reducer_->sum_of(i);
  // As the parameter lies in memory now: somebody may have laid it out anew, even between two micro-batches.
  if (sum.values.defined() && same_layout(sum.values, working)) return;
  HALFSTEP_CHECK(
      !reducer_, "MixedPrecision: '", param.name,
      "' changed its layout or started to require a gradient in the middle of a step. With ranks, do that "
      "between steps.");
  const MemoryClassScope memory(MemoryClass::Gradient);
  const auto options = working.options().requires_grad(false);
  const auto lay_out = [&](at::Tensor& tensor, at::ScalarType type) {
    const at::Tensor made = at::empty_like(working, options.dtype(type));
    if (sum.begun) made.copy_(tensor);
    tensor = made;
  };
  const bool kahan = kind_ == Accumulation::Bf16Kahan;
  lay_out(sum.values, kahan ? at::kBFloat16 : at::kFloat);
  if (kahan) lay_out(sum.compensation, at::kBFloat16);
}

void GradAccumulator::add(const std::vector<Param>& params, const std::vector<std::size_t>& which) {
  const MemoryClassScope memory(MemoryClass::Gradient);
  sums_.resize(params.size());
  std::vector<at::Tensor> grads;
  std::vector<int64_t> counts;
  for (const std::size_t i : which) {
    const at::Tensor& working = params[i].working;
    grads.push_back(grad_laid_out_as(working, working.grad()));
    counts.push_back(working.numel());
    make_sum(i, params[i]);
  }

  const auto chunks = chunks_of(counts);
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const auto [array, first, count] = chunks[i];
    const at::Tensor& grad = grads[array];
    const Format format = *training_format(grad.scalar_type());
    const void* from = address_of(grad.const_data_ptr(), first, grad.element_size());
    const Sum& sum = sums_[which[array]];
    if (kind_ == Accumulation::Fp32)
      accumulate(format, from, sum.values.mutable_data_ptr<float>() + first, count, !sum.begun);
    else
      accumulate_kahan(format, from, static_cast<std::uint16_t*>(sum.values.mutable_data_ptr()) + first,
                       static_cast<std::uint16_t*>(sum.compensation.mutable_data_ptr()) + first, count,
                       !sum.begun);
  });
  for (const std::size_t i : which) sums_[i].begun = true;
  if (reducer_)
    for (const std::size_t i : which) sums_[i].values = at::Tensor();  // the reducer's, who may let it go
}

void GradAccumulator::close(const std::vector<Param>& params, const std::vector<Param>& updated,
                            std::vector<int32_t>* largest) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = params[i].working.grad();
    const bool is_ours = reducer_ ? closed_ : i < sums_.size() && grad.is_same(sums_[i].values);
    HALFSTEP_CHECK(!grad.defined() || is_ours, "MixedPrecision: close_sum, but '", params[i].name,
                   "' has a gradient that MixedPrecision::backward did not make, which is in no sum of "
                   "micro-batches. Call mp.backward(loss) for every loss.");
  }
  if (reducer_ && !closed_) sum_over_ranks(params, largest);
  closed_ = true;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i].begun) continue;
    at::Tensor sum = reducer_ ? reducer_->result_of(i) : sums_[i].values;
    // Not a view of its bucket: LibTorch's zero_grad detaches gradients in place, which views refuse. None
    // where other ranks require a gradient and this one does not.
    if (reducer_ && sum.defined()) sum = sum.detach();
    updated[i].working.mutable_grad() = sum;
  }
}

void GradAccumulator::sum_over_ranks(const std::vector<Param>& params, std::vector<int32_t>* largest) {
  const at::NoGradGuard no_grad;
  if (micro_batches_ == 0) begin_backward(params);  // a rank without a batch in this step takes part
  GradReducer::Found found{.finite = bad_micro_batch_ < 0,
                           .micro_batch = bad_micro_batch_,
                           .param = 0,
                           .begun = {},
                           .largest = {}};
  for (Sum& sum : sums_) found.begun.push_back(sum.begun |= sum.begun_in_step);
  for (std::size_t i = 0; i < params.size(); ++i)
    if (params[i].name == bad_parameter_) found.param = i;
  if (largest != nullptr) found.largest = *largest;
  if (!params.empty() && !kernels_serve(params.front().working))
    agree_on_device(params.front().working.device());
  const GradAgreement agreed = reducer_->finish(found);
  for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i].begun = agreed.any_grad[i] != 0;
  if (largest != nullptr) *largest = agreed.largest;
  bad_micro_batch_ = agreed.finite ? -1 : agreed.micro_batch;
  bad_parameter_ = agreed.finite ? "" : params[agreed.param].name;
  bad_rank_ = reducer_->ranks().size() > 1 ? agreed.rank : -1;
}

/// Micro-batches that were not finite, of all ranks: a sum may hide one whose norm alone was too large.
void GradAccumulator::agree_on_device(at::Device device) {
  bad_on_any_rank_ = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  for (const GradSummary& each : on_device_)
    if (each.on_device()) bad_on_any_rank_.add_(each.on_device()->found_inf);
  reducer_->ranks().sum(bad_on_any_rank_);
}

GradSummary GradAccumulator::summary(const std::vector<Param>& updated, double loss_scale,
                                     GradDetail detail) const {
  const GradSummary sums =
      reducer_ && reducer_->has_parts()
          ? GradSummary(findings_of(updated, squares_of_parts(updated), loss_scale, detail))
          : halfstep::inspect_grads(updated, loss_scale, detail);
  if (bad_micro_batch_ < 0) return sums;
  return GradSummary({.finite = false,
                      .any = true,
                      .norm = sums.norm(),
                      .loss_scale = loss_scale,
                      .first_bad = bad_parameter_,
                      .micro_batch = bad_micro_batch_,
                      .rank = bad_rank_,
                      .params = sums.params(),
                      .without_grad = sums.without_grad()});
}

GradSquares GradAccumulator::squares_of_parts(const std::vector<Param>& updated) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (std::size_t i = 0; i < updated.size(); ++i) {
    const bool has = updated[i].working.grad().defined();
    // Of a canonical sum each rank has all, and adds up its squares in the order of one process.
    grads.push_back(!has                    ? at::Tensor()
                    : reducer_->canonical() ? reducer_->sum_of(i)
                                            : updated[i].working.grad());
  }
  GradSquares squares = squares_of(grads);
  if (reducer_->canonical()) return squares;
  const at::Tensor message = at::zeros({static_cast<int64_t>(squares.size())}, at::kDouble);
  auto* const numbers = message.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < squares.size(); ++i) numbers[i] = squares[i].value_or(0);
  reducer_->ranks().sum(message);
  for (std::size_t i = 0; i < squares.size(); ++i)
    if (squares[i]) squares[i] = numbers[i];
  return squares;
}

void GradAccumulator::begin_step() {
  if (reducer_ && !closed_) reducer_->drop_step();
  for (Sum& sum : sums_) sum.begun = sum.begun_in_step = false;
  bad_rank_ = -1;
  micro_batches_ = 0;
  bad_micro_batch_ = -1;
  bad_parameter_.clear();
  on_device_.clear();
  bad_on_any_rank_ = at::Tensor();
  first_on_device_ = 0;
  closed_ = false;
}

StateDict GradAccumulator::live_form(const std::vector<Param>& params) const {
  StateDict saved;
  if (micro_batches_ == 0 || closed_) return saved;
  HALFSTEP_CHECK(!reducer_,
                 "MixedPrecision: the state of a step's first micro-batches is each rank's own. With ranks, "
                 "save between steps, after mp.advance(grads).");
  saved.set("micro_batches", micro_batches_);
  saved.set("bad_micro_batch", bad_micro_batch_);
  saved.set("bad_parameter", bad_parameter_);
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i].begun) continue;
    saved.set("sum." + params[i].name, sums_[i].values);
    if (sums_[i].compensation.defined()) saved.set("compensation." + params[i].name, sums_[i].compensation);
  }
  return saved;
}

void GradAccumulator::load(const StateDict& saved, const std::vector<Param>& params) {
  GradAccumulator loaded(kind_, reducer_);
  if (saved.size() > 0) {
    HALFSTEP_CHECK(!reducer_,
                   "MixedPrecision: the saved state is of the middle of a step, which with ranks no process "
                   "can resume from. Save between steps, after mp.advance(grads).");
    loaded.micro_batches_ = loaded.first_on_device_ = saved.integer("micro_batches");
    loaded.bad_micro_batch_ = saved.integer("bad_micro_batch");
    loaded.bad_parameter_ = saved.text("bad_parameter");
    loaded.sums_.resize(params.size());
    Faults faults;
    faults.expect(loaded.micro_batches_ > 0, "'micro_batches' is ", loaded.micro_batches_,
                  ", expected a count");
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!saved.contains("sum." + params[i].name)) continue;
      loaded.make_sum(i, params[i]);
      Sum& sum = loaded.sums_[i];
      sum.begun = true;
      const auto take = [&](const std::string& name, at::Tensor& into) {
        faults.expect_like(name, saved.tensor(name), into);
        if (saved.tensor(name).sizes() == into.sizes()) into.copy_(saved.tensor(name));
      };
      take("sum." + params[i].name, sum.values);
      if (sum.compensation.defined()) take("compensation." + params[i].name, sum.compensation);
    }
    faults.throw_if_any("MixedPrecision, sum of micro-batches");
    // What names are left over belong to no parameter, or to another kind of accumulation.
    std::vector<std::string> names;
    for (const auto& [name, value] : loaded.live_form(params)) names.push_back(name);
    saved.expect_exactly("MixedPrecision, sum of micro-batches", {names.begin(), names.end()});
  }
  *this = std::move(loaded);
}

}  // namespace halfstep::train
