// What an inspection of the gradients found, and the one number that the optimizer takes.
#pragma once

#include <halfstep/config.h>
#include <halfstep/params.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace halfstep {

/// The gradient of one parameter.
struct ParamGrad {
  std::string name;
  double norm = 0.0;  ///< un-scaled
  bool finite = true;
};

/// What a pass over the gradients found, as plain numbers.
struct GradFindings {
  bool finite = true;
  bool any = false;                 ///< whether there was a gradient at all
  double norm = 0.0;                ///< joint 2-norm, un-scaled; summed in FP64, on an accelerator in FP32
  double loss_scale = 1.0;          ///< the one that the gradients carry
  std::string first_bad{};          ///< the first parameter whose gradient is not finite
  int64_t micro_batch = -1;         ///< in which micro-batch it was, counted from 0; -1 without accumulation
  int rank = -1;                    ///< on which rank it was first; -1 in one process, or in the sum of all
  std::vector<ParamGrad> params{};  ///< filled on request
  /// Parameters that require a gradient and have none. Nothing updates them: in a model that uses all of its
  /// parameters in each step that is a broken tie, a detach() or a layer that forward forgot.
  std::vector<std::string> without_grad{};
};

class GradMultiplier;
struct GradsOnDevice;  // Halfstep's own: findings that an accelerator has

/// What one read-only pass over all gradients found: GradFindings, read on request. Copies share
/// them.
///
/// Of gradients on an accelerator the numbers are there, and the first question waits for the device; any()
/// and without_grad() never do. An optimizer that is given them does not ask.
class HALFSTEP_API GradSummary {
 public:
  GradSummary() : GradSummary(GradFindings{}) {}
  explicit GradSummary(GradFindings findings)
      : findings_(std::make_shared<const GradFindings>(std::move(findings))) {}

  explicit GradSummary(std::shared_ptr<const GradsOnDevice> grads) : on_device_(std::move(grads)) {}

  /// Fields of GradFindings.
  bool finite() const { return findings().finite; }
  bool any() const { return known().any; }
  double norm() const { return findings().norm; }
  double loss_scale() const { return findings().loss_scale; }
  const std::string& first_bad() const { return findings().first_bad; }
  int64_t micro_batch() const { return findings().micro_batch; }
  int rank() const { return findings().rank; }
  const std::vector<ParamGrad>& params() const { return findings().params; }
  const std::vector<std::string>& without_grad() const { return known().without_grad; }

  /// Null for gradients on the CPU.
  const std::shared_ptr<const GradsOnDevice>& on_device() const { return on_device_; }

  /// Un-scale only.
  [[nodiscard]] GradMultiplier unclipped() const;

  /// Un-scale, and scale down to a joint norm of at most `max_norm`, as torch's clip_grad_norm_ does.
  [[nodiscard]] GradMultiplier clipped_to(double max_norm) const;

 private:
  const GradFindings& findings() const;
  const GradFindings& known() const;

  std::shared_ptr<const GradFindings> findings_{};
  std::shared_ptr<const GradsOnDevice> on_device_{};
};

/// Un-scaling and clipping as one number, with the summary of the gradients that it belongs to. A default one
/// means: as they are, not looked at.
///
/// The optimizer multiplies as it reads: gradients are never rewritten, hence never un-scaled twice.
class HALFSTEP_API GradMultiplier {
 public:
  GradMultiplier() = default;
  explicit GradMultiplier(GradSummary grads, double max_norm = std::numeric_limits<double>::infinity());

  /// Un-scale, clip and `factor`, if there is one, in one number.
  double value() const;
  /// The same with another factor: 1 / ranks, where gradients were summed over ranks. Clipping holds for what
  /// the factor leaves, the mean.
  [[nodiscard]] GradMultiplier times(double factor) const;
  /// Without a value: not looked at.
  const std::optional<GradSummary>& grads() const { return grads_; }
  double max_norm() const { return max_norm_; }  ///< infinity: not clipped
  double factor() const { return factor_; }      ///< that `times` was given

 private:
  std::optional<GradSummary> grads_{};
  double max_norm_ = std::numeric_limits<double>::infinity();
  double factor_ = 1.0;
};

/// Whether an inspection fills GradFindings::params too.
enum class GradDetail { Total, PerParam };

/// Looks at the gradients of `params`: one read of each, on two threads or more the same bits as on one.
///
/// Not finite is also a gradient whose square, un-scaled, does not fit FP32 (a norm above 2^63): AdamW would
/// keep an infinite second moment for it and never move that weight again.
///
/// `loss_scale` is the one that the gradients carry; it must be given for parameters of a MixedPrecision that
/// scales its loss.
[[nodiscard]] HALFSTEP_API GradSummary inspect_grads(const std::vector<Param>& params,
                                                     std::optional<double> loss_scale = {},
                                                     GradDetail detail = GradDetail::Total);

}  // namespace halfstep
