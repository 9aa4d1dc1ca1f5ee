// What a look at the gradients on an accelerator found: numbers that the device has and the host may not.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/grads.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensor/transfers.h"

namespace halfstep {

/// Scalars of one device. Whoever steps by them does not ask for their values.
struct GradsOnDevice {
  at::Tensor norm;        // FP32: joint, with the loss scale in it
  at::Tensor finite;      // Bool
  at::Tensor found_inf;   // FP32: 1 where the step is skipped, else 0, as LibTorch's fused operations take it
  at::Tensor loss_scale;  // FP32; undefined without loss scaling. MixedPrecision's own, which moves on:
  int64_t loss_scale_version = 0;

  /// What the host knows without asking: whether there are gradients, and who has none.
  GradFindings known;
  /// All of it. Waits for the device, the first time.
  const GradFindings& read() const;
  bool arrived() const;

  std::vector<std::string> names;          // of the parameters that have gradients
  std::vector<GradSummary> micro_batches;  // of which these gradients are the sum, from that number on:
  int64_t first_micro_batch = 0;
  GradDetail detail = GradDetail::Total;
  Arrival arrival;  // norms, joint norm, finite, and the loss scale if there is one
  mutable std::optional<GradFindings> found_{};
  std::unique_ptr<std::mutex> mutex =
      std::make_unique<std::mutex>();  // copies of a summary are read by any thread
};

/// One foreach operation over all gradients and a few on scalars; nothing waits. `loss_scale` is a scalar of
/// the device, or undefined. `micro_batches`: of which the gradients are the sum, to name the bad one.
/// `bad_elsewhere`: a scalar of the device that is not 0 where another rank has found a bad one.
GradSummary inspect_on_device(const std::vector<Param>& params, const at::Tensor& loss_scale,
                              GradDetail detail, std::vector<GradSummary> micro_batches = {},
                              int64_t first_micro_batch = 0, const at::Tensor& bad_elsewhere = {});

/// What LibTorch's fused optimizers divide gradients by: un-scale, clip and factor in one scalar of the
/// device. Undefined where that is 1.
at::Tensor divisor_on_device(const GradMultiplier& multiplier);

}  // namespace halfstep
