#include <halfstep/run_watch.h>

#include "log/record_text.h"

namespace halfstep {

RunWatcher::~RunWatcher() = default;

std::string_view to_string(RunOutcome outcome) {
  switch (outcome) {
    case RunOutcome::Done:
      return "done";
    case RunOutcome::Interrupted:
      return "interrupted";
    case RunOutcome::OutOfTime:
      return "out of time";
    case RunOutcome::Diverged:
      return "diverged";
    case RunOutcome::Failed:
      return "failed";
  }
  return "unknown";
}

std::string to_json(const RunPlan& plan) {
  log::JsonLine line;
  line.begin("plan", plan.steps_done);
  line.text("model", plan.model);
  line.integer("parameters", plan.parameters);
  line.text("precision", plan.precision);
  line.text("data", plan.data);
  line.text("folder", plan.folder);
  line.text("unit", plan.unit);
  line.integer("steps", plan.steps);
  line.integer("items_per_step", plan.items_per_step);
  line.integer("threads", plan.threads);
  return std::string(line.end());
}

std::string note_to_json(int64_t step, double seconds, std::string_view text) {
  log::JsonLine line;
  return std::string(log::note_line(line, step, seconds, text));
}

std::string to_json(const RunEnd& end, double seconds) {
  log::JsonLine line;
  return std::string(log::end_line(line, end.step, seconds, to_string(end.outcome), end.why));
}

}  // namespace halfstep
