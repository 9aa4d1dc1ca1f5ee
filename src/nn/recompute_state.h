// What a second run of the same code must find as the first did.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <functional>
#include <optional>
#include <vector>

#include "autocast/active_policy.h"

namespace halfstep {

/// Taken at the first run: autocast with its policy, and the random generators of the CUDA devices that the
/// tensors are on. The CPU's random numbers are RegionRandom's.
class RecomputeState {
 public:
  explicit RecomputeState(const std::vector<at::Tensor>& tensors);

  /// Runs `body` in that state with gradients on, then puts everything back, after an exception too.
  void run(const std::function<void()>& body) const;

 private:
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType low;
  };
  struct Random {
    at::Generator generator;
    at::Tensor state;
  };
  class AutocastGuard;
  class RandomGuard;

  std::vector<Autocast> autocast_;
  std::optional<ActivePolicy> policy_;
  std::vector<Random> random_;
};

}  // namespace halfstep
