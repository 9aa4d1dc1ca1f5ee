// What became of one optimizer step.
#pragma once

#include <halfstep/config.h>

#include <string>

namespace halfstep {

enum class StepOutcome {
  Stepped,             ///< the parameters were updated
  SkippedNonFinite,    ///< a gradient held an Inf or a NaN; parameters and optimizer state are as they were
  SkippedNoGradients,  ///< no parameter had a gradient: nothing to check, nothing to do
};

/// The result of a step, as a value. A step that was skipped should be hard to ignore.
struct HALFSTEP_API StepReport {
  StepOutcome outcome = StepOutcome::Stepped;
  double loss_scale = 1.0;  ///< the one that these gradients carried
  std::string parameter;    ///< the first one whose gradient was not finite; empty if there was none

  bool stepped() const { return outcome == StepOutcome::Stepped; }

  /// One sentence for a log: "stepped", or why not and which parameter.
  std::string sentence() const;
};

}  // namespace halfstep
