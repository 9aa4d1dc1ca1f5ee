// Notices that weights are not updated by an optimizer that knows what they need.
#pragma once

#include <halfstep/params.h>

#include <cstdint>
#include <vector>

namespace halfstep::train {

/// An optimizer of torch::optim writes to working copies alone, and knows nothing of a loss scale. What it
/// leaves is an edit like any other; that no optimizer of ours comes by, step after step, gives it away.
class WeightWatch {
 public:
  /// Around each backward of a MixedPrecision that keeps no sum of its own. Throws an Error after ten steps
  /// in a row whose gradients were cleared and never inspected.
  void begin_backward(const std::vector<Param>& params);
  void end_backward(const std::vector<Param>& params);

  /// Called when gradients are inspected.
  void note(const std::vector<Param>& params);

  /// Whether another step than the noted one is under way: an optimizer of ours has updated weights since,
  /// and these are new gradients.
  bool another_step(const std::vector<Param>& params) const;

  /// Called at the end of a step. Throws an Error after ten in a row that no optimizer of ours took or
  /// skipped, if weights with masters or with a loss scale had gradients; a few may be left out on purpose.
  void end_step(const std::vector<Param>& params);

 private:
  /// Keeps the address, not the gradient: a later gradient cannot be mistaken for one that is gone.
  using WeakGrad = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  int64_t noted_updates_ = 0, noted_skips_ = 0;
  WeakGrad noted_grad_{at::Tensor().getIntrusivePtr()};  // compared only
  const Param* first_in_need_ = nullptr;                 // with a gradient, and a master or a loss scale
  int64_t steps_without_update_ = 0;

  const Param* uninspected_ = nullptr;  // first in need, since the last backward
  int64_t steps_without_inspect_ = 0;
};

}  // namespace halfstep::train
