// Signals that ask a run to stop.
#pragma once

#include <atomic>

namespace halfstep::cli {

/// From construction until the end of the block SIGINT, SIGTERM and SIGUSR1 ask politely: `requested` becomes
/// true and the run ends after its step. A second one ends the process at once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  const std::atomic<bool>& requested() const;
  int signal() const;  ///< the one that came; 0 if none
};

}  // namespace halfstep::cli
