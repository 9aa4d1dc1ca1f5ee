#include <halfstep/run_watch.h>

namespace halfstep {

RunWatcher::~RunWatcher() = default;

std::string_view to_string(RunOutcome outcome) {
  switch (outcome) {
    case RunOutcome::Done:
      return "done";
    case RunOutcome::Interrupted:
      return "interrupted";
    case RunOutcome::Diverged:
      return "diverged";
  }
  return "unknown";
}

}  // namespace halfstep
