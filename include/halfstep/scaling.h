// Loss scaling for FP16: its options, its state machine, and GradScaler, which runs it over any
// torch::optim::Optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/error.h>
#include <halfstep/state_dict.h>
#include <halfstep/step_report.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace halfstep {

/// How the loss scale moves. The defaults are torch.amp's, with bounds that torch.amp lacks.
struct LossScaling {
  double initial = 0x1p16;
  double growth_factor = 2.0;   ///< applied after `growth_interval` clean steps in a row
  double backoff_factor = 0.5;  ///< applied when gradients were not finite
  int64_t growth_interval = 2000;

  /// How many non-finite steps since the last growth it takes to lower the scale. 1 lowers it on the first;
  /// 2, as in DeepSpeed and Megatron, forgives one stray overflow.
  int64_t hysteresis = 1;

  /// The loss scale never falls below this. FP16 holds magnitudes from 2^-24 to 2^16: a gradient that still
  /// overflows under a scale of 2^-24 is about 2^40 or more, and no loss scale is its remedy.
  double floor = 0x1p-24;

  /// The loss scale never rises above this. 2^126 is the largest power of two whose inverse is a normal FP32
  /// number, so that un-scaling is exact and survives a processor that flushes subnormals to zero.
  double cap = 0x1p126;

  /// A run of this many skipped steps is an error (SkipLimitError) instead of a loop that trains nothing.
  /// From 2^16 the default floor is reached after 40 skips; 100 leaves room. 0 means no limit.
  int64_t max_consecutive_skips = 100;

  /// Throws an Error that names the first field which makes no sense, with the values that do.
  HALFSTEP_API void check() const;
};

/// All that loss scaling remembers from step to step. A run resumed without it follows another path.
struct LossScaleState {
  double loss_scale = 0x1p16;      ///< always a value that FP32 holds exactly
  int64_t clean_steps = 0;         ///< in a row, since the scale last moved or a step was skipped
  int64_t overflows_forgiven = 0;  ///< since the last growth; see LossScaling::hysteresis
  int64_t consecutive_skips = 0;
  int64_t total_skips = 0;

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// The state before the first step.
HALFSTEP_API LossScaleState initial_state(const LossScaling& options);

/// The state after a step whose gradients were finite, or were not. With options that pass check(), the loss
/// scale in it is positive, finite, and has a finite inverse, whatever the history.
HALFSTEP_API LossScaleState next_state(const LossScaling& options, LossScaleState state, bool grads_finite);

/// Too many steps in a row were skipped: training has stopped moving.
class HALFSTEP_API SkipLimitError : public Error {
 public:
  SkipLimitError(const std::string& message, std::string parameter)
      : Error(message), parameter(std::move(parameter)) {}
  const std::string parameter;  ///< whose gradient was not finite in the last of them
};

/// Whether a GradScaler does anything.
struct GradScalerOptions {
  bool enabled = true;
};

/// Scales the loss, un-scales the gradients, and steps an optimizer only when every gradient is finite.
///
///     scaler.scale(loss).backward();              // loss from a forward under AutocastScope(at::kHalf)
///     const auto report = scaler.step(optimizer);
///     scaler.update();
///     optimizer.zero_grad();
///
/// A loop that is written once for all precisions turns it off where there is nothing to scale:
/// GradScaler scaler({}, {.enabled = type == at::kHalf}). It then passes losses through, looks at nothing and
/// steps always, as torch.amp's does.
///
/// To look at gradients or clip them, call unscale_(optimizer) between backward and step.
///
/// For any torch::optim optimizer that needs no closure, which is all but LBFGS. Results are those of
/// torch.amp 2.13 except where torch.amp is wrong; docs/scaling.md lists each difference with its test. Any
/// number of optimizers may share one scaler: unscale_ and step once each, then one update, until which each
/// of them must live.
///
/// Between steps it remembers a LossScaleState: save state_dict() with the weights. Between unscale_ and
/// update it also remembers which optimizers were seen, and that is not saved: save between steps.
///
/// On an accelerator scale, unscale_ and update do not wait for the device. step reads one flag a device,
/// because a torch::optim optimizer runs on the host and the host must know whether to call it. Only when
/// that flag is set are gradients read one by one, to find whose it was. (An optimizer that was un-scaled and
/// not stepped is read in update instead.)
///
/// One scaler belongs to one training loop; it is not thread-safe.
class HALFSTEP_API GradScaler {
 public:
  explicit GradScaler(LossScaling options = {}, GradScalerOptions switches = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Reports then say "layers.3.weight" where they otherwise say "parameter 7 (group 0, shape [64, 10])".
  /// Call it again when parameters were replaced: names go by the tensors that the model has now.
  void name_parameters(const torch::nn::Module& model);

  /// outputs x loss scale, in the type of the outputs; a 0-dim FP16 or BF16 loss becomes FP32.
  at::Tensor scale(const at::Tensor& outputs) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs) const;

  /// Divides the gradients of this optimizer by the loss scale and looks for Inf and NaN.
  ///
  /// FP16 gradients are replaced by FP32 ones (twice the bytes): dividing in FP16 would push small gradients
  /// back below FP16's range, which is what loss scaling is there to prevent.
  /// Once per optimizer between two updates; a second call is an Error.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Un-scales unless that was done, then calls optimizer.step() if every gradient is finite at that moment:
  /// gradients spoiled after unscale_, by clipping for instance, are found too.
  /// Once per optimizer between two updates.
  [[nodiscard]] StepReport step(torch::optim::Optimizer& optimizer);

  /// Moves the loss scale on. Once after all optimizers have stepped.
  /// Throws SkipLimitError when `max_consecutive_skips` is reached; the state has moved on by then, so a
  /// caller that knows better may catch it and continue.
  void update();

  /// Sets the loss scale instead of moving it; an Error unless it lies between floor and cap.
  void update(double new_loss_scale);

  double get_scale() const;  ///< 1 where it is not enabled
  bool is_enabled() const;
  const LossScaling& options() const;
  const LossScaleState& state() const;

  /// Options and state. Loading refuses a state that could not have been saved: missing or unknown names,
  /// a scale that is not finite or out of bounds, negative counts.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& saved);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Scales gradients down so that their joint 2-norm is at most `max_norm`; returns the norm before that, as a
/// 0-dim FP64 tensor on the gradients' device, without waiting for it. With a GradScaler, unscale_ first.
///
/// The norm is accumulated in FP64: torch's clip_grad_norm_ takes the norm of FP16 gradients in FP16, where a
/// true norm of 128000 is Inf and every gradient becomes 0. A norm that is not finite leaves the gradients
/// alone, so that the scaler still sees whose gradient it was.
HALFSTEP_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm);

}  // namespace halfstep
