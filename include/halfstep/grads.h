// What a look at the gradients found, and the one number that goes on to the optimizer.
#pragma once

#include <halfstep/config.h>
#include <halfstep/params.h>

#include <cstdint>
#include <string>
#include <vector>

namespace halfstep {

/// Un-scaling and clipping as one number, with what a report needs to say about the gradients it belongs to.
/// A default one means: as they are, not looked at.
///
/// The optimizer multiplies as it reads: gradients are never rewritten, hence never un-scaled twice.
struct GradMultiplier {
  double value = 1.0;
  bool finite = true;        ///< false: the step is skipped
  double norm = 0.0;         ///< joint 2-norm, un-scaled, before clipping
  double loss_scale = 1.0;   ///< the one that the gradients carry
  std::string first_bad{};   ///< the first parameter whose gradient is not finite
  int64_t micro_batch = -1;  ///< in which micro-batch it was, counted from 0; -1 without accumulation
  bool inspected = false;    ///< whether it comes from a GradSummary
  std::vector<std::string> without_grad{};  ///< see GradSummary
};

/// The gradient of one parameter.
struct ParamGrad {
  std::string name;
  double norm = 0.0;  ///< un-scaled
  bool finite = true;
};

/// What one read-only pass over all gradients found.
struct HALFSTEP_API GradSummary {
  bool finite = true;
  bool any = false;         ///< whether there was a gradient at all
  double norm = 0.0;        ///< joint 2-norm, un-scaled, accumulated in FP64
  double loss_scale = 1.0;  ///< the one that the gradients carry
  std::string first_bad{};  ///< see GradMultiplier
  int64_t micro_batch = -1;
  std::vector<ParamGrad> params{};  ///< filled on request
  /// Parameters that require a gradient and have none. Nothing updates them: in a model that uses all of its
  /// parameters in each step that is a broken tie, a detach() or a layer that forward forgot.
  std::vector<std::string> without_grad{};

  /// Un-scale only.
  [[nodiscard]] GradMultiplier unclipped() const;

  /// Un-scale, and scale down to a joint norm of at most `max_norm`, as torch's clip_grad_norm_ does.
  [[nodiscard]] GradMultiplier clipped_to(double max_norm) const;
};

enum class GradDetail { Total, PerParam };

/// Looks at the gradients of `params`: one read of each, on two threads or more the same bits as on one.
///
/// Not finite is also a gradient whose square, un-scaled, does not fit FP32 (a norm above 2^63): AdamW would
/// keep an infinite second moment for it and never move that weight again.
[[nodiscard]] HALFSTEP_API GradSummary inspect_grads(const std::vector<Param>& params,
                                                     double loss_scale = 1.0,
                                                     GradDetail detail = GradDetail::Total);

}  // namespace halfstep
