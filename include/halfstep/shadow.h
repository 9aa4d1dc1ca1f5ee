// Shadow mode: what other precisions would make of each linear layer's products, seen in one FP32 run.
#pragma once

#include <halfstep/config.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/precision.h>
#include <halfstep/run_log.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace halfstep {

/// A precision to compare with FP32, under a name for its records.
struct ShadowedPrecision {
  std::string name;
  Precision precision;
};

/// What a Shadow computes, and when.
struct ShadowOptions {
  std::vector<ShadowedPrecision> precisions{};
  int64_t every = 1;  ///< looks at the first step and at each that this divides
};

/// Repeats the products of each linear layer in other precisions while a model trains in FP32, and measures
/// how far they are from FP32's: the output, the gradient of the input, and the gradient of the weight, each
/// from the operands that the run has.
///
///     halfstep::TrainStep step(halfstep::Precision::fp32(), *model, halfstep::AdamWOptions{.lr = 3e-4});
///     halfstep::Shadow shadow(step.mixed_precision(),
///                             {.precisions = {{"mxfp8", halfstep::Precision::mxfp8()}}, .every = 10});
///     for (const auto& batch : batches) {
///       (void)step([&] { return loss_of(model, batch); });
///       for (const auto& record : shadow.take()) log.shadow(record);
///     }
///
/// A layer is a weight of two dimensions that `linear`, `addmm`, `matmul` or `mm` is given. Those that a
/// recipe keeps in high precision are left out for that recipe. The repeated products are the ones that
/// training in the precision computes: the operation runs again inside an AutocastScope with the recipe.
/// FP16's have the loss scale of its options, halved where gradients would not be finite. A product that is
/// not finite in FP32 is left out. The run keeps its bits.
///
/// A step that is looked at takes about as long as one forward and backward of the linear layers in each
/// precision, emulated ones included. With delayed scaling, the largest magnitudes of the steps in between
/// are noted: a read of the operands each.
///
/// It takes the place of the MixedPrecision's Probe, and needs FP32 on the CPU without
/// sharding. Layers inside `checkpoint_activations` are not seen.
class HALFSTEP_API Shadow {
 public:
  /// An Error if `mp` is not of FP32, on an accelerator or sharded, or if a precision has nothing to compare.
  explicit Shadow(MixedPrecision& mp, ShadowOptions options);
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;

  /// The number of the step that is next; 1 before the first.
  void set_step(int64_t number);
  /// Of the steps that were looked at since the last call. `seconds` is the caller's to fill in.
  [[nodiscard]] std::vector<ShadowRecord> take();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace halfstep
