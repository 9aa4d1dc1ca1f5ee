// Says what a run that makes no progress is doing.
#pragma once

#include <halfstep/run_watch.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace halfstep::train {

/// Looks from a thread of its own. A phase that takes longer than the limit is told to the watcher, then
/// again each time it has taken twice as long.
class Watchdog {
 public:
  /// No thread for a limit of 0.
  Watchdog(double limit_seconds, RunWatcher& watcher);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// From now on: "step 12", "evaluating after step 12".
  void now(std::string doing);

 private:
  using Clock = std::chrono::steady_clock;
  void look();

  double limit_seconds_;
  RunWatcher& watcher_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::string doing_;
  Clock::time_point since_ = Clock::now();
  double told_seconds_ = 0;
  bool end_ = false;
  std::thread thread_;
};

}  // namespace halfstep::train
