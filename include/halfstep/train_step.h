// A whole training step as one object.
#pragma once

#include <ATen/TensorOperators.h>
#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <halfstep/scaling.h>

#include <cmath>
#include <limits>
#include <utility>

namespace halfstep {

/// What a TrainStep does beside one backward and one update.
struct TrainStepOptions {
  /// Gradients are scaled down to this joint norm; infinity: never.
  double max_grad_norm = std::numeric_limits<double>::infinity();
  /// Batches whose mean loss makes one step, on each rank; of a canonical sum (RankReduction) on all
  /// together. With more than one, gradients are summed in FP32 unless `precision.accumulation` says
  /// otherwise.
  int64_t micro_batches = 1;
  MixedPrecisionOptions precision{};
};

/// The lines of a training loop as one object: forward, backward, the look at the gradients, the update, the
/// loss scale.
///
///     halfstep::TrainStep step(halfstep::Precision::bf16(), *model, halfstep::AdamWOptions{.lr = 3e-4});
///     for (const auto& batch : batches) {
///       const auto report = step([&] { return loss_of(model, batch); });
///       if (!report.stepped()) std::puts(report.sentence().c_str());
///     }
///
/// The pieces are there for loops that need something in between: mixed_precision(), optimizer(). Save
/// state_dict() of both. A function that throws makes no step: its gradients are dropped.
template <typename Options>
class TrainStep {
 public:
  /// `model`: whatever MixedPrecision takes.
  template <typename Model>
  TrainStep(Precision precision, Model&& model, Options optimizer, TrainStepOptions options = {})
      : options_(checked(options)),
        precision_(std::move(precision), std::forward<Model>(model), options_.precision),
        optimizer_(precision_.params(), std::move(optimizer)) {}

  /// For parameters in groups, a seed, or several models: `optimizer` is over precision.params(), or a part
  /// of them. `options.precision` is not read: `precision` has its own.
  TrainStep(MixedPrecision precision, FusedOptimizer<Options> optimizer, TrainStepOptions options = {})
      : options_(checked(options)), precision_(std::move(precision)), optimizer_(std::move(optimizer)) {}

  /// Calls `loss_of_batch` once for each micro-batch, and steps. Throws SkipLimitError when too many steps in
  /// a row were skipped.
  template <typename Function>
  [[nodiscard]] StepReport operator()(Function&& loss_of_batch, StepOptions options = {}) {
    loss_ = at::Tensor();
    try {
      const int64_t batches = batches_here();
      for (int64_t i = 0; i < batches; ++i)
        add_micro_batch(precision_.forward(loss_of_batch), /*last=*/i + 1 == batches);
      precision_.close_sum();
      const GradSummary grads = precision_.inspect_grads();
      const bool clips = std::isfinite(options_.max_grad_norm);
      StepReport report =
          optimizer_.step(clips ? grads.clipped_to(options_.max_grad_norm) : grads.unclipped(), options);
      // Of all parameters: the optimizer may have a part of them.
      for (const Param& param : precision_.params()) param.working.mutable_grad().reset();
      precision_.advance(grads);
      return report;
    } catch (const SkipLimitError&) {
      throw;  // the step is over
    } catch (...) {
      precision_.zero_grad();
      loss_ = at::Tensor();
      throw;
    }
  }

  /// Runs `function` in the precision and returns what it returns: for evaluation.
  template <typename Function>
  auto forward(Function&& function) const {
    return precision_.forward(std::forward<Function>(function));
  }

  /// Mean loss of the last step's batches, where it was computed and not yet read; with ranks, of this one's.
  const at::Tensor& loss() const { return loss_; }

  /// The pieces: for saving, and for what a loop does in between.
  MixedPrecision& mixed_precision() { return precision_; }
  const MixedPrecision& mixed_precision() const { return precision_; }
  FusedOptimizer<Options>& optimizer() { return optimizer_; }
  const FusedOptimizer<Options>& optimizer() const { return optimizer_; }

 private:
  static TrainStepOptions checked(TrainStepOptions options) {
    HALFSTEP_CHECK(options.max_grad_norm > 0, "TrainStep: max_grad_norm is ", options.max_grad_norm,
                   ", expected a positive number; infinity clips nothing.");
    HALFSTEP_CHECK(options.micro_batches >= 1, "TrainStep: micro_batches is ", options.micro_batches,
                   ", expected 1 or more.");
    if (options.micro_batches > 1 && options.precision.accumulation == Accumulation::None)
      options.precision.accumulation = Accumulation::Fp32;
    return options;
  }

  /// Of a canonical sum, this rank's share of a step's micro-batches; else each rank has as many.
  int64_t batches_here() const {
    const int64_t canonical = precision_.reduction().canonical_batches;
    HALFSTEP_CHECK(canonical == 0 || canonical == options_.micro_batches, "TrainStep: micro_batches is ",
                   options_.micro_batches, ", and a canonical sum is of ", canonical,
                   ": both are the batches of a step, on all ranks together.");
    return canonical > 0 ? precision_.ranks().share(canonical).count : options_.micro_batches;
  }

  void add_micro_batch(const at::Tensor& loss, bool last) {
    const at::Tensor share = options_.micro_batches > 1 ? loss / options_.micro_batches : loss;
    precision_.backward(share, {.last = last});
    loss_ = loss_.defined() ? loss_ + share.detach() : share.detach();
  }

  TrainStepOptions options_;
  MixedPrecision precision_;
  FusedOptimizer<Options> optimizer_;
  at::Tensor loss_{};
};

}  // namespace halfstep
