// Codes and products on an accelerator, by LibTorch's own operations. Nothing here waits for the device: the
// largest magnitudes stay there, and so do the scales that are made from them.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/recipe.h>

#include "quant/quantised.h"

namespace halfstep {

/// An Error that says why, for a recipe that at::_scaled_mm has no scales for.
void check_runs_on_device(const Recipe& recipe, const at::Device& device);

/// One scale for all, or one for each row that the product sums over. `amax` has the largest magnitudes that
/// the scales are made from, one of each: those of largest_on_device, or from earlier steps.
HALFSTEP_API Quantised quantised_on_device(const at::Tensor& matrix, const OperandRule& rule,
                                           bool sums_over_rows, const at::Tensor& amax, int margin);

/// FP32, of a shape that stretches over the matrix.
HALFSTEP_API at::Tensor largest_on_device(const at::Tensor& matrix, const OperandRule& rule,
                                          bool sums_over_rows);

/// product(), by at::_scaled_mm, which sums in FP32. A bias is rounded to `output` before it is added.
HALFSTEP_API at::Tensor product_on_device(const Quantised& left, const Quantised& right,
                                          const at::Tensor& bias, at::ScalarType output);

/// In a history, and in its saved form: nothing was seen.
inline constexpr float kNoAmax = -1;

/// AmaxHistory where only the device knows the numbers.
class HALFSTEP_API AmaxHistoryOnDevice {
 public:
  /// What the next scale is made from: of past steps, or `own` before there are any.
  at::Tensor amax(const DelayedScaling& options, const at::Tensor& own) const;
  void note(const at::Tensor& amax);
  /// `skipped` is a scalar of the device, not 0 where the step leaves no trace.
  void end_step(const at::Tensor& skipped, std::int64_t length);
  void drop_step() { this_step_.reset(); }

  /// AmaxHistory's form, on the host: waits.
  at::Tensor saved() const;
  void load(const at::Tensor& saved, std::int64_t length, const at::Device& device);

 private:
  at::Tensor past_;       // [length], newest last; kNoAmax where there is none. Undefined: none at all
  at::Tensor this_step_;  // undefined: nothing was noted
};

}  // namespace halfstep
