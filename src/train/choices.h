// From the words of a configuration to the values of Halfstep's pieces.
#pragma once

#include <halfstep/optim.h>
#include <halfstep/precision.h>
#include <halfstep/run_config.h>

#include <variant>

namespace halfstep::train {

/// An Error for an operation in precision.ops that has no rule to change.
Precision precision_of(const RunConfig& config);

Schedule schedule_of(const RunConfig& config);
AdamWOptions adamw_of(const RunConfig& config);
SgdOptions sgd_of(const RunConfig& config);

/// AdamW or SGD over two groups: weight decay is for matrices; biases and the weights of norms have none.
class RunOptimizer {
 public:
  RunOptimizer(const std::vector<Param>& params, const RunConfig& config);

  [[nodiscard]] StepReport step(const GradMultiplier& multiplier, StepOptions options);
  void zero_grad();
  double lr_at(int64_t steps) const;  ///< of the step after so many
  int64_t steps() const;              ///< that were taken; waits for an accelerator
  StateDict state_dict() const;
  /// What was saved, with the options of the configuration: rate, decay and schedule may be others now.
  void load_state_dict(const StateDict& saved);

 private:
  std::vector<Param> params_;
  RunConfig config_;
  std::variant<AdamW, SGD> optimizer_;
};

}  // namespace halfstep::train
