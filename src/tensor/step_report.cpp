#include <halfstep/error.h>
#include <halfstep/step_report.h>

namespace halfstep {

std::string StepReport::sentence() const {
  switch (outcome) {
    case StepOutcome::Stepped:
      return "stepped";
    case StepOutcome::SkippedNonFinite:
      return detail::concat("skipped: the gradient of ", parameter, " is not finite at loss scale ",
                            loss_scale);
    case StepOutcome::SkippedNoGradients:
      return "skipped: no parameter of this optimizer has a gradient";
  }
  HALFSTEP_BUG("unknown step outcome ", static_cast<int>(outcome));
}

}  // namespace halfstep
