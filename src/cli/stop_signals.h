// What every command that trains asks of its process: a polite end, and threads that sleep while they wait.
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

/// How often LibTorch's threads look before they sleep: 0.4 ms.
inline constexpr const char* kBriefSpins = "10000";

/// Whether the environment says how LibTorch's threads wait.
bool says_how_threads_wait();

/// Lets LibTorch's threads spin for a moment only and then sleep, unless the environment says how they wait.
/// OpenMP reads that when it is loaded, so the program starts anew, with the same arguments: call this before
/// anything is read, written or waited for. See docs/decisions/0067-threads-spin-briefly.md.
void spin_briefly();

}  // namespace halfstep::cli
