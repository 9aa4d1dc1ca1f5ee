#include <halfstep/error.h>
#include <halfstep/step_report.h>

namespace halfstep {

StepOutcome StepReport::outcome() const {
  if (!grads_.finite()) return StepOutcome::SkippedNonFinite;
  return updated_ ? StepOutcome::Stepped : StepOutcome::SkippedNoGradients;
}

const std::vector<UpdateStall>& StepReport::stalls() const {
  HALFSTEP_CHECK(stalls_,
                 "StepReport: stalls were not counted in this step. Ask for them: "
                 "optimizer.step(multiplier, {.stalls = true}).");
  return *stalls_;
}

UpdateStall StepReport::stall() const {
  UpdateStall all;
  int64_t most_lost = 0;
  for (const UpdateStall& one : stalls()) {
    all.updates += one.updates;
    all.held += one.held;
    all.lost += one.lost;
    if (one.lost <= most_lost) continue;
    most_lost = one.lost;
    all.parameter = one.parameter;
  }
  return all;
}

std::string StepReport::sentence() const {
  const auto& without = without_grad();
  switch (outcome()) {
    case StepOutcome::Stepped:
      if (without.empty()) return "stepped";
      return detail::concat("stepped; ", without.size(), without.size() == 1 ? " parameter" : " parameters",
                            " without a gradient, first ", without.front());
    case StepOutcome::SkippedNonFinite:
      return detail::concat("skipped: the gradient of ", parameter(), " is not finite at loss scale ",
                            loss_scale(),
                            micro_batch() < 0 ? "" : detail::concat(", in micro-batch ", micro_batch()));
    case StepOutcome::SkippedNoGradients:
      return "skipped: no parameter of this optimizer has a gradient";
  }
  HALFSTEP_BUG("unknown step outcome ", static_cast<int>(outcome()));
}

}  // namespace halfstep
