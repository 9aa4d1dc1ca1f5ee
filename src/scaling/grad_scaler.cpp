#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <halfstep/scaling.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>

#include "scaling/scaler_state.h"
#include "scaling/unscaling.h"

namespace halfstep {
namespace {

/// What has happened to one optimizer since the last update.
struct Round {
  bool unscaled = false;
  bool stepped = false;
  scaling::NonFiniteFlags flags;
};

}  // namespace

struct GradScaler::Impl : scaling::ScalerState {
  bool enabled = true;
  scaling::ParameterNames names;

  // Since the last update:
  std::map<torch::optim::Optimizer*, Round> rounds;
  scaling::UnscaledGrads unscaled_grads;
  std::string skipped_parameter;  // empty while every step went well

  bool found_non_finite(torch::optim::Optimizer& optimizer, const Round& round) {
    if (!round.flags.any_set()) return false;
    skipped_parameter = scaling::first_non_finite(optimizer, names);
    if (skipped_parameter.empty()) skipped_parameter = "a parameter (finite again since unscale_ checked it)";
    return true;
  }

  void end_round() {
    rounds.clear();
    unscaled_grads.clear();
    skipped_parameter.clear();
  }
};

GradScaler::GradScaler(LossScaling options, GradScalerOptions switches) : impl_(std::make_unique<Impl>()) {
  impl_->enabled = switches.enabled;
  impl_->options = options;
  impl_->state = initial_state(options);
}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

double GradScaler::get_scale() const { return impl_->enabled ? impl_->state.loss_scale : 1.0; }
bool GradScaler::is_enabled() const { return impl_->enabled; }
const LossScaling& GradScaler::options() const { return impl_->options; }
const LossScaleState& GradScaler::state() const { return impl_->state; }

void GradScaler::name_parameters(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters())
    impl_->names[item.value().unsafeGetTensorImpl()] = item.key();
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  if (!impl_->enabled) return outputs;
  // A 0-dim FP32 tensor, as in torch.amp: a 0-dim FP16 loss then becomes FP32 instead of overflowing.
  return outputs *
         at::full({}, impl_->state.loss_scale, outputs.options().dtype(at::kFloat).requires_grad(false));
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) const {
  std::vector<at::Tensor> scaled;
  for (const auto& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!impl_->enabled) return;
  Round& round = impl_->rounds[&optimizer];
  HALFSTEP_CHECK(!round.stepped, "GradScaler: unscale_ after step. Call update() first.");
  HALFSTEP_CHECK(
      !round.unscaled,
      "GradScaler: unscale_ was already called for this optimizer since the last update(). A second "
      "time would divide its gradients twice.");
  const at::NoGradGuard no_grad;
  scaling::make_unscalable_(optimizer, impl_->names);

  // One that another optimizer has too was un-scaled with that one's.
  const auto grads = scaling::grads_of(optimizer);
  std::vector<at::Tensor> scaled, unscaled_before;
  for (const auto& grad : grads) {
    const bool before = impl_->unscaled_grads.contains(grad.tensor);
    HALFSTEP_CHECK(
        !before || !impl_->unscaled_grads.has_changed(grad.tensor), "GradScaler: the gradient of ",
        grad.parameter_name(impl_->names),
        " was un-scaled with another optimizer's and written to since, so it may or may not "
        "carry the loss scale. Call update() between the two optimizers, or give each its own parameters.");
    (before ? unscaled_before : scaled).push_back(grad.values);
  }

  const double inv_loss_scale =
      1.0 / impl_->state.loss_scale;  // in FP64, rounded once to FP32, as torch.amp does
  scaling::multiply_and_check_(scaled, inv_loss_scale, round.flags);
  // The engine looks before it multiplies, and a multiplier above 1 can make an Inf of a finite number.
  if (inv_loss_scale > 1.0) scaling::multiply_and_check_(scaled, 1.0, round.flags);
  scaling::multiply_and_check_(unscaled_before, 1.0, round.flags);
  scaling::multiply_and_check_(scaling::summed_rows(grads), 1.0, round.flags);
  for (const auto& grad : grads) impl_->unscaled_grads.insert(grad.tensor);
  round.unscaled = !grads.empty();  // with nothing to un-scale yet, a later call may still find something
}

StepReport GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!impl_->enabled) {
    optimizer.step();
    return {GradSummary(), /*updated=*/true};
  }
  Round& round = impl_->rounds[&optimizer];
  HALFSTEP_CHECK(!round.stepped,
                 "GradScaler: step was already called for this optimizer. Call update() first.");
  if (!round.unscaled) {
    unscale_(optimizer);
  } else {
    // Clipping or the caller's own code has had the gradients since unscale_ looked at them.
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> values;
    const auto grads = scaling::grads_of(optimizer);
    for (const auto& grad : grads) values.push_back(grad.values);
    scaling::multiply_and_check_(values, 1.0, round.flags);
    for (const auto& grad : grads) impl_->unscaled_grads.insert(grad.tensor);
  }

  GradFindings found{.any = !round.flags.empty(), .loss_scale = impl_->state.loss_scale};
  found.finite = !found.any || !impl_->found_non_finite(optimizer, round);
  if (!found.finite) found.first_bad = impl_->skipped_parameter;
  const bool steps = found.any && found.finite;
  if (steps) optimizer.step();
  round.stepped = true;
  return {GradSummary(std::move(found)), steps};
}

void GradScaler::update() {
  if (!impl_->enabled) return;
  HALFSTEP_CHECK(!impl_->rounds.empty(),
                 "GradScaler: update without a step since the last update(). Call step() first.");
  bool checked = false;
  for (auto& [optimizer, round] : impl_->rounds) {
    checked |= !round.flags.empty();
    if (!round.stepped)
      impl_->found_non_finite(*optimizer, round);  // un-scaled and left there: it counts all the same
  }
  const std::string parameter = impl_->skipped_parameter;
  impl_->end_round();
  if (!checked) return;  // no gradient anywhere: neither a clean step nor a skipped one

  auto& state = impl_->state;
  state = next_state(impl_->options, state, parameter.empty());
  scaling::check_skip_limit("GradScaler", impl_->options, state, parameter);
}

void GradScaler::update(double new_loss_scale) {
  if (!impl_->enabled) return;
  const auto& options = impl_->options;
  HALFSTEP_CHECK(options.floor <= new_loss_scale && new_loss_scale <= options.cap,
                 "GradScaler: new loss scale ", new_loss_scale, " is not between ", options.floor,
                 " (floor) and ", options.cap, " (cap).");
  impl_->state.loss_scale =
      initial_state({.initial = new_loss_scale, .floor = options.floor, .cap = options.cap}).loss_scale;
  impl_->end_round();
}

StateDict GradScaler::state_dict() const {
  return impl_->enabled ? scaling::saved_form(*impl_) : StateDict();
}

void GradScaler::load_state_dict(const StateDict& saved) {
  if (!impl_->enabled) return;
  static_cast<scaling::ScalerState&>(*impl_) = scaling::loaded_from(saved);
  impl_->end_round();
}

}  // namespace halfstep
