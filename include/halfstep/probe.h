// Looks into training steps: what the numbers of each tensor are like.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/run_log.h>
#include <halfstep/tensor_stats.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace halfstep {

/// One pass over a dense tensor of FP64, FP32, BF16 or FP16; that of another device is copied here first.
/// FP64 is rounded to FP32 before: what FP32 does not hold counts as Inf, or as a zero.
[[nodiscard]] HALFSTEP_API TensorStats statistics_of(const at::Tensor& tensor);

/// As the statistics of all ranks' tensors: outputs of layers, which each rank has of its own batches, and
/// with `parts` all others too, of which each has a part. All ranks call it, whatever records each has: a
/// layer that the batches of some went past is in the result of all. It exchanges something in each call, and
/// so belongs behind steps that Probe::looks_at.
[[nodiscard]] HALFSTEP_API std::vector<ProbeRecord> merged_over_ranks(std::vector<ProbeRecord> records,
                                                                      const Ranks& ranks, bool parts);

/// Which steps a Probe looks at, and at what.
struct ProbeOptions {
  /// The first step, and each that this divides; after 40 looks every second of these, after 80 every fourth.
  int64_t every = 50;
  bool activations = true;  ///< what layers put out; weights, gradients and updates are looked at always
};

/// Gathers statistics of the tensors of some steps: of each layer's output and of what a softmax is given,
/// where a mask counts as -Inf (role "activation"), of each parameter's gradient with its loss scale
/// ("gradient"), of the weights ("weight") and of what the optimizer added to them ("update"). Steps in
/// between cost nothing; a step that is looked at keeps a copy of the weights while it is updated, and on an
/// accelerator waits once for each tensor that it counts.
///
///     halfstep::Probe probe(step.mixed_precision(), {.every = 50});
///     for (const auto& batch : batches) {
///       const auto report = step([&] { return loss_of(model, batch); });
///       for (const auto& record : probe.take()) log.probe(record);
///     }
///
/// Where a loop calls loss.backward() itself, so that autograd adds the gradients of several micro-batches in
/// their own 16 bits, records of gradients say how many forwards they are of.
///
/// A layer's output is what the operation puts out that is given its weight. A forward that throws, one
/// without gradients, and a step that mp.zero_grad() starts again leave nothing. A MixedPrecision has one
/// Probe at a time, the last one made, and may be moved or end before it; so may the Probe, within a step
/// too.
class HALFSTEP_API Probe {
 public:
  explicit Probe(MixedPrecision& mp, ProbeOptions options = {});
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  /// The number of the step that is next; 1 before the first.
  void set_step(int64_t number);
  /// Whether the step of this number is one that it looks at; the same on all ranks.
  bool looks_at(int64_t number) const;
  /// Of the steps that were looked at since the last call. `seconds` is the caller's to fill in.
  [[nodiscard]] std::vector<ProbeRecord> take();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace halfstep
