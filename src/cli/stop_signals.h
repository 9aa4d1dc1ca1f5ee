// Signals that ask a run to stop.
#pragma once

#include <atomic>

namespace halfstep::cli {

/// From construction until the end of the process SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask politely:
/// `requested` becomes true and the run ends after its step, however often they come. A SIGINT that is not
/// the first ends the process at once, with a code of its own. A reader of the output that goes away ends
/// nothing.
class StopSignals {
 public:
  StopSignals();

  const std::atomic<bool>& requested() const;
  int signal() const;  ///< the one that came; 0 if none
};

}  // namespace halfstep::cli
