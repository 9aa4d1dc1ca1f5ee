// Who wants to see the tensors of a training step while they are there.
#pragma once

#include <halfstep/params.h>

#include <memory>
#include <vector>

namespace halfstep {

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  /// Of these parameters, as the model has them. What it returns lives as long as the forward.
  virtual std::shared_ptr<void> begin_forward(const std::vector<Param>& params) = 0;
  /// They are complete, and carry the loss scale. Before the update, once a step.
  virtual void see_gradients(const std::vector<Param>& params) = 0;
  /// After the update, if there was one.
  virtual void end_step(const std::vector<Param>& params) = 0;
  /// The step that was begun starts again.
  virtual void drop_step() = 0;
};

}  // namespace halfstep
