// What a second run of the same code must find as the first did.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
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

/// Gives both runs of a region the same random numbers on the CPU, whatever other threads draw meanwhile.
///
/// LibTorch's default CPU generator is one for all threads. Inside a run, operators that are not given a
/// generator draw from a private one that takes over the stream of the default one, or of the private one of
/// a region around; others who draw meanwhile are given another stream. Where nobody did, the generator is at
/// the end of the first run where a plain call would have left it. A generator that an operator is given is
/// drawn from in the first run, and a copy of it in the second.
/// (docs/decisions/0084.)
///
/// Generators of other devices are left alone.
class RegionRandom {
 public:
  RegionRandom();

  /// A generator that an operator of the region was given, and a copy of it from before.
  struct Given {
    at::Generator generator, copy;
  };
  class Streams;

  class FirstRun {
   public:
    explicit FirstRun(RegionRandom& region);
    ~FirstRun();
    FirstRun(const FirstRun&) = delete;
    FirstRun& operator=(const FirstRun&) = delete;

   private:
    RegionRandom& region_;
    std::shared_ptr<Streams> streams_;
    c10::DebugInfoGuard streams_guard_;
    c10::impl::IncludeDispatchKeyGuard key_guard_;
  };

  class SecondRun {
   public:
    explicit SecondRun(const RegionRandom& region);
    SecondRun(const SecondRun&) = delete;
    SecondRun& operator=(const SecondRun&) = delete;

   private:
    c10::DebugInfoGuard streams_guard_;
    c10::impl::IncludeDispatchKeyGuard key_guard_;
  };

 private:
  at::Generator start_;  // of the first run's numbers; undefined where it drew none
  std::vector<Given> given_;
};

}  // namespace halfstep
