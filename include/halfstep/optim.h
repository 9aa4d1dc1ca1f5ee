// AdamW and SGD that know masters: one pass un-scales, clips, updates moments and master, and writes the
// working copy.
#pragma once

#include <halfstep/config.h>
#include <halfstep/grads.h>
#include <halfstep/params.h>
#include <halfstep/schedule.h>
#include <halfstep/state_dict.h>
#include <halfstep/step_report.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace halfstep {

/// The numbers of AdamW. The defaults are torch::optim::AdamW's.
struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< decoupled: weights shrink by lr * weight_decay a step
  MomentStorage moments = MomentStorage::Fp32;
  Schedule schedule{};  ///< multiplies lr

  /// Throws an Error that names the first field which makes no sense.
  HALFSTEP_API void check() const;
};

/// The numbers of SGD.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;  ///< added to the gradient, as in torch::optim::SGD
  bool nesterov = false;
  MomentStorage moments = MomentStorage::Fp32;
  Schedule schedule{};  ///< multiplies lr

  /// Throws an Error that names the first field which makes no sense.
  HALFSTEP_API void check() const;
};

/// Of one call of FusedOptimizer::step.
struct StepOptions {
  /// Count, parameter by parameter, which updates were too small to move a weight: StepReport::stalls.
  bool stalls = false;
};

/// Parameters with options of their own.
template <typename Options>
struct ParamGroup {
  std::vector<Param> params;
  Options options;
};

/// A fused optimizer over masters. Use it by its two names below.
///
///     halfstep::AdamW optimizer(mp.params(), {.lr = 3e-4, .weight_decay = 0.1});
///     const auto report = optimizer.step(mp.inspect_grads().clipped_to(1.0));
///
/// Each element's update is computed in FP32, in the order of LibTorch's own fused AdamW; docs/optimizers.md
/// has the formulas and what was compared. Gradients may be FP32, BF16 or FP16, of any layout. Results do not
/// depend on the number of threads.
///
/// Between steps it remembers moments, a step count for each parameter, and its own: save state_dict() with
/// the weights. A parameter that appears twice is stepped once; two that share memory in part are an Error.
///
/// One optimizer belongs to one training loop; it is not thread-safe.
template <typename Options>
class FusedOptimizer {
 public:
  /// `seed` is for storages that round at random; a resumed run needs the same, so it is part of the state.
  FusedOptimizer(std::vector<Param> params, Options options = {}, uint64_t seed = 0);
  explicit FusedOptimizer(std::vector<ParamGroup<Options>> groups, uint64_t seed = 0);
  ~FusedOptimizer();
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  /// Updates every parameter that has a gradient, or nothing at all if the gradients are not finite.
  [[nodiscard]] StepReport step(const GradMultiplier& multiplier, StepOptions options = {});

  /// Drops the gradients; the next backward makes new ones.
  void zero_grad();

  /// Steps that were taken, skipped ones not counted. The schedules go by it.
  int64_t steps() const;

  /// Options of a group, to look at or to change between steps. `moments` cannot change.
  const Options& options(size_t group = 0) const;
  void set_options(Options options, size_t group = 0);

  /// Everything that it remembers; loading refuses names, types or shapes that do not fit, all at once.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& saved);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

extern template class HALFSTEP_API FusedOptimizer<AdamWOptions>;
extern template class HALFSTEP_API FusedOptimizer<SgdOptions>;

/// The optimizers, by the names to use. docs/optimizers.md has their formulas.
using AdamW = FusedOptimizer<AdamWOptions>;
using SGD = FusedOptimizer<SgdOptions>;

}  // namespace halfstep
