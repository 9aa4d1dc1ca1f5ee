#include <ATen/core/grad_mode.h>
#include <halfstep/error.h>
#include <halfstep/optim.h>

#include <cmath>

#include "optim/device_update.h"
#include "optim/optimizer_state.h"
#include "optim/rules.h"
#include "tensor/dense.h"
#include "tensor/grads_on_device.h"
#include "tensor/param_checks.h"
#include "tensor/update_path.h"

namespace halfstep {

template <typename Options>
struct FusedOptimizer<Options>::Impl : optim::OptimizerState<Options> {
  using Rule = optim::Rule<Options>;

  /// One parameter that is updated in this step.
  struct Job {
    optim::Slot* slot;
    at::Tensor grad;
    UpdateLayout layout;
    decltype(Rule::constants({}, 0, 0, 0, {})) constants;
    UpdateCounts counts{};
  };

  Impl(std::vector<ParamGroup<Options>> given, uint64_t seed) {
    this->seed = seed;
    std::vector<const std::vector<Param>*> params;
    for (const auto& group : given) {
      group.options.check();
      this->groups.push_back(group.options);
      params.push_back(&group.params);
    }
    this->slots = optim::make_slots(Rule::kName, params);
    for (optim::Slot& slot : this->slots) {
      slot.storage = this->groups[slot.group].moments;
      if (slot.param.working.requires_grad()) give_moments(slot);
    }
    if (kernels_serve(this->slots.front().param.working)) return;
    for (const optim::Slot& slot : this->slots) optim::check_for_device(Rule::kName, slot);
    for (const Options& options : this->groups) optim::check_options_for_device(options);
    on_device.emplace(*this);
  }

  /// A frozen parameter has none until it is updated.
  void give_moments(optim::Slot& slot) const {
    const int moments = Rule::moment_count(this->groups[slot.group]);
    if (moments >= 1 && !slot.first.values.defined())
      slot.first = optim::make_moment(slot.param, slot.storage);
    if (moments >= 2 && !slot.second.values.defined())
      slot.second = optim::make_moment(slot.param, slot.storage);
  }

  /// The default multiplier takes gradients as they are, and those of a scaled loss are not.
  void check_not_scaled() const {
    for (const optim::Slot& slot : this->slots)
      HALFSTEP_CHECK(!slot.param.loss_scaled || !slot.param.working.grad().defined(), Rule::kName,
                     ": step without a GradSummary, but the gradient of '", slot.param.name,
                     "' carries a loss scale. Use step(mp.inspect_grads().unclipped()), or clipped_to(...).");
  }

  /// Those that have a gradient, with moments and master. Looks at everything that could be wrong before
  /// anything is written.
  std::vector<optim::Slot*> slots_to_update() {
    std::vector<optim::Slot*> found;
    for (optim::Slot& slot : this->slots) {
      const at::Tensor& grad = slot.param.working.grad();
      if (!grad.defined()) continue;
      take_replaced(slot.param);
      optim::check_slot(Rule::kName, slot);
      check_grad(slot.param, grad);
      give_moments(slot);
      give_master(slot.param);
      found.push_back(&slot);
    }
    return found;
  }

  std::vector<Job> jobs(double grad_multiplier) {
    std::vector<Job> jobs;
    for (optim::Slot* const each : slots_to_update()) {
      optim::Slot& slot = *each;
      const at::Tensor& grad = slot.param.working.grad();
      const Options& options = this->groups[slot.group];
      const double learning_rate = options.lr * options.schedule.factor(this->steps);
      const StochasticKey random{
          .seed = this->seed, .tensor = slot.id, .step = static_cast<std::uint32_t>(slot.steps)};
      jobs.push_back(
          {.slot = &slot,
           .grad = grad_laid_out_as(slot.param.working, grad),
           .layout = {.grad = *training_format(grad.scalar_type()),
                      .working = *training_format(slot.param.working.scalar_type()),
                      .weights = slot.param.storage,
                      .moments = slot.storage},
           .constants = Rule::constants(options, learning_rate, grad_multiplier, slot.steps + 1, random)});
    }
    return jobs;
  }

  /// On an accelerator: the same without our kernels, and without waiting.
  bool step_on_device(const GradMultiplier& multiplier) {
    (void)slots_to_update();
    return on_device->step(multiplier);
  }

  std::optional<optim::DeviceUpdate<Options>> on_device{};

  static void run(std::vector<Job>& jobs) {
    std::vector<int64_t> counts;
    for (const Job& job : jobs) counts.push_back(job.grad.numel());
    const auto chunks = chunks_of(counts);
    std::vector<UpdateCounts> found(chunks.size());
    for_each_chunk(chunks.size(), [&](std::size_t i) {
      const auto [array, first, count] = chunks[i];
      const Job& job = jobs[array];
      found[i] = Rule::update(job.layout, job.constants, optim::run_of(*job.slot, job.grad, first, count));
    });
    for (std::size_t i = 0; i < chunks.size(); ++i) jobs[chunks[i].array].counts += found[i];
  }
};

template <typename Options>
FusedOptimizer<Options>::FusedOptimizer(std::vector<ParamGroup<Options>> groups, uint64_t seed)
    : impl_(std::make_unique<Impl>(std::move(groups), seed)) {}

template <typename Options>
FusedOptimizer<Options>::FusedOptimizer(std::vector<Param> params, Options options, uint64_t seed)
    : FusedOptimizer(std::vector<ParamGroup<Options>>{{std::move(params), std::move(options)}}, seed) {}

template <typename Options>
FusedOptimizer<Options>::~FusedOptimizer() = default;
template <typename Options>
FusedOptimizer<Options>::FusedOptimizer(FusedOptimizer&&) noexcept = default;
template <typename Options>
FusedOptimizer<Options>& FusedOptimizer<Options>::operator=(FusedOptimizer&&) noexcept = default;

template <typename Options>
StepReport FusedOptimizer<Options>::step(const GradMultiplier& multiplier, StepOptions options) {
  const at::NoGradGuard no_grad;
  const GradSummary grads = multiplier.grads().value_or(GradSummary());
  HALFSTEP_CHECK(!impl_->on_device || !options.stalls, Impl::Rule::kName,
                 ": StepOptions::stalls, but LibTorch's operations, which update parameters on ",
                 impl_->slots.front().param.working.device(),
                 ", do not report which updates were lost. Leave it out there.");
  if (!multiplier.grads()) impl_->check_not_scaled();
  if (grads.on_device()) {
    const double factor = multiplier.factor();
    HALFSTEP_CHECK(factor == 0 || (factor > 0 && std::isnormal(static_cast<float>(factor)) &&
                                   std::isnormal(static_cast<float>(1 / factor))),
                   Impl::Rule::kName, ": the gradients are multiplied by ", factor,
                   ", expected 0 or a number that FP32 holds in full, and its inverse too.");
    const double shrink = factor / multiplier.max_norm();  // 0 where nothing is clipped
    HALFSTEP_CHECK(shrink == 0 || std::isnormal(static_cast<float>(shrink)), Impl::Rule::kName,
                   ": gradients are clipped to a norm of ", multiplier.max_norm(),
                   ", whose inverse FP32 does not hold. Clip to a larger one.");
    HALFSTEP_CHECK(impl_->on_device, Impl::Rule::kName, ": the gradients that were inspected are on ",
                   grads.on_device()->norm.device(),
                   ", the parameters on the CPU. Give the summary of these "
                   "parameters' gradients.");
    return {grads, impl_->step_on_device(multiplier)};
  }
  std::optional<std::vector<UpdateStall>> stalls;  // of a step without updates: none
  if (options.stalls) stalls.emplace();
  if (!grads.finite()) {
    for (const optim::Slot& slot : impl_->slots)
      if (slot.param.record) ++slot.param.record->skips;
    return {grads, /*updated=*/false, std::move(stalls)};
  }
  // As the kernels use it. Below the normal numbers it would have fewer bits, or none.
  const double value = multiplier.value();
  const auto value_fp32 = static_cast<float>(value);
  HALFSTEP_CHECK(value == 0 || (std::isnormal(value_fp32) && value_fp32 > 0), Impl::Rule::kName,
                 ": the gradient multiplier is ", value,
                 ", expected 0 or a number that FP32 holds in full, from 2^-126 to 2^127. Un-scale and clip "
                 "travel as one number: lower LossScaling::cap, or clip to a larger norm.");
  if (impl_->on_device) return {grads, impl_->step_on_device(multiplier)};
  auto jobs = impl_->jobs(value);
  if (jobs.empty()) return {grads, /*updated=*/false, std::move(stalls)};
  Impl::run(jobs);
  for (auto& job : jobs) {
    ++job.slot->steps;
    note_update(job.slot->param);
    if (stalls)
      stalls->push_back({.parameter = job.slot->param.name,
                         .updates = static_cast<int64_t>(job.counts.nonzero),
                         .held = static_cast<int64_t>(job.counts.working_unmoved),
                         .lost = static_cast<int64_t>(job.counts.lost)});
  }
  ++impl_->steps;
  return {grads, /*updated=*/true, std::move(stalls)};
}

template <typename Options>
void FusedOptimizer<Options>::zero_grad() {
  for (optim::Slot& slot : impl_->slots) slot.param.working.mutable_grad().reset();
}

template <typename Options>
int64_t FusedOptimizer<Options>::steps() const {
  if (impl_->on_device) impl_->on_device->read_counts();
  return impl_->steps;
}

template <typename Options>
const Options& FusedOptimizer<Options>::options(size_t group) const {
  HALFSTEP_CHECK(group < impl_->groups.size(), Impl::Rule::kName, ": there is no group ", group, " among ",
                 impl_->groups.size(), ".");
  return impl_->groups[group];
}

template <typename Options>
void FusedOptimizer<Options>::set_options(Options options, size_t group) {
  options.check();
  if (impl_->on_device) optim::check_options_for_device(options);
  const Options& present = this->options(group);
  HALFSTEP_CHECK(options.moments == present.moments &&
                     Impl::Rule::moment_count(options) == Impl::Rule::moment_count(present),
                 Impl::Rule::kName, ": the moments of group ", group,
                 " are kept already; their storage cannot change. Build a new optimizer.");
  impl_->groups[group] = std::move(options);
}

template <typename Options>
StateDict FusedOptimizer<Options>::state_dict() const {
  if (impl_->on_device) impl_->on_device->read_counts();
  return optim::saved_form<Options>(*impl_);
}

template <typename Options>
void FusedOptimizer<Options>::load_state_dict(const StateDict& saved) {
  const at::NoGradGuard no_grad;
  optim::load<Options>(saved, *impl_);
  if (impl_->on_device) impl_->on_device->write_counts();
}

template class FusedOptimizer<AdamWOptions>;
template class FusedOptimizer<SgdOptions>;

}  // namespace halfstep
