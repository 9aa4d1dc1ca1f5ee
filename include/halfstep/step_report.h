// What became of one optimizer step.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <string>
#include <vector>

namespace halfstep {

enum class StepOutcome {
  Stepped,             ///< the parameters were updated
  SkippedNonFinite,    ///< a gradient held an Inf or a NaN; parameters and optimizer state are as they were
  SkippedNoGradients,  ///< no parameter had a gradient: nothing to check, nothing to do
};

/// What became of the updates of one parameter, element by element. Counted by Halfstep's own optimizers.
struct UpdateStall {
  std::string parameter;
  int64_t updates = 0;  ///< elements whose update was a number other than 0
  int64_t held = 0;     ///< of these: too small to move the working copy; with a master they add up there
  int64_t lost = 0;     ///< of these: rounded away for good, because no copy of the weight moved

  double held_fraction() const { return updates == 0 ? 0.0 : static_cast<double>(held) / updates; }
  double lost_fraction() const { return updates == 0 ? 0.0 : static_cast<double>(lost) / updates; }
};

/// The result of a step, as a value. A step that was skipped should be hard to ignore.
struct HALFSTEP_API StepReport {
  StepOutcome outcome = StepOutcome::Stepped;
  double loss_scale = 1.0;  ///< the one that these gradients carried
  std::string parameter{};  ///< the first one whose gradient was not finite; empty if there was none

  // Filled by Halfstep's own optimizers:
  double grad_norm = 0.0;             ///< joint 2-norm, un-scaled, before clipping
  int64_t micro_batch = -1;           ///< which one was not finite, counted from 0; -1 without accumulation
  std::vector<UpdateStall> stalls{};  ///< one for each parameter that was updated
  std::vector<std::string> without_grad{};  ///< GradSummary::without_grad

  bool stepped() const { return outcome == StepOutcome::Stepped; }

  /// All parameters together; its `parameter` is the one that lost most, empty if none lost any.
  UpdateStall stall() const;

  /// One sentence for a log: "stepped", or why not and which parameter. Parameters that required a gradient
  /// and had none are counted, and the first is named.
  std::string sentence() const;
};

}  // namespace halfstep
