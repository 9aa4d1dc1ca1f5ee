// What became of one optimizer step.
#pragma once

#include <halfstep/config.h>
#include <halfstep/grads.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace halfstep {

/// What became of a step.
enum class StepOutcome {
  Stepped,             ///< the parameters were updated
  SkippedNonFinite,    ///< a gradient held an Inf or a NaN; parameters and optimizer state are as they were
  SkippedNoGradients,  ///< no parameter had a gradient: nothing to check, nothing to do
};

/// What became of the updates of one parameter, element by element. Counted by Halfstep's own optimizers
/// where StepOptions asks for it.
struct UpdateStall {
  std::string parameter;
  int64_t updates = 0;  ///< elements whose update was a number other than 0
  int64_t held = 0;     ///< of these: too small to move the working copy; with a master they add up there
  int64_t lost = 0;     ///< of these: rounded away for good, because no copy of the weight moved

  /// Shares of `updates`; 0 where there were none.
  double held_fraction() const { return updates == 0 ? 0.0 : static_cast<double>(held) / updates; }
  double lost_fraction() const { return updates == 0 ? 0.0 : static_cast<double>(lost) / updates; }
};

/// The result of a step, as a value, read on request. A step that was skipped should be hard to
/// ignore.
class HALFSTEP_API StepReport {
 public:
  /// Of a step with these gradients. `updated`: whether any parameter had one. `stalls`: if they were
  /// counted.
  StepReport(GradSummary grads, bool updated, std::optional<std::vector<UpdateStall>> stalls = {})
      : grads_(std::move(grads)), updated_(updated), stalls_(std::move(stalls)) {}

  /// Whether the parameters were updated, and why not.
  StepOutcome outcome() const;
  bool stepped() const { return outcome() == StepOutcome::Stepped; }
  double loss_scale() const { return grads_.loss_scale(); }  ///< the one that these gradients carried
  /// The first one whose gradient was not finite; empty if there was none.
  const std::string& parameter() const { return grads_.first_bad(); }

  // Known to Halfstep's own optimizers:
  double grad_norm() const { return grads_.norm(); }  ///< joint 2-norm, un-scaled, before clipping
  /// Which one was not finite, counted from 0; -1 without accumulation.
  int64_t micro_batch() const { return grads_.micro_batch(); }
  /// The first that had one that was not finite; -1 in one process.
  int rank() const { return grads_.rank(); }
  const std::vector<std::string>& without_grad() const { return grads_.without_grad(); }

  /// One for each parameter that was updated. An Error where they were not asked for: StepOptions::stalls.
  const std::vector<UpdateStall>& stalls() const;
  /// All parameters together; its `parameter` is the one that lost most, empty if none lost any.
  UpdateStall stall() const;

  /// One sentence for a log: "stepped", or why not and which parameter. Parameters that required a gradient
  /// and had none are counted, and the first is named.
  std::string sentence() const;

 private:
  GradSummary grads_;
  bool updated_;
  std::optional<std::vector<UpdateStall>> stalls_;
};

}  // namespace halfstep
