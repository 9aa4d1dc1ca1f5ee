// Who looks at a run while it goes: at its loss, and at its pulse.
#pragma once

#include <halfstep/run_watch.h>
#include <halfstep/state_dict.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace halfstep::train {

/// Compares each loss with the lowest mean of kWindow losses in a row that the run has had, plus a margin:
/// half of all that the run had learnt until then, and six deviations of the losses in that window.
///
///   in trouble   the last loss is above or not finite, or the last kShort steps were skipped
///   diverged     the last kLong losses are above: no batch by itself does that
///
/// A loss that is not finite counts as above. Steps that were skipped say nothing of the loss.
class DivergenceWatch {
 public:
  static constexpr size_t kWindow = 16, kShort = 4, kLong = 32;

  void see(int64_t step, double loss, bool skipped);

  bool in_trouble() const;
  /// A sentence with the numbers, if it has.
  std::optional<std::string> diverged() const;
  /// The first step of the present row of losses above; the next step if the last was not.
  int64_t above_since() const { return above_since_; }

  StateDict state_dict() const;
  void load_state_dict(const StateDict& saved);

 private:
  double limit() const { return lowest_mean_ + margin_; }

  std::vector<double> latest_;  ///< at most kWindow, the oldest first
  double first_mean_ = 0, lowest_mean_ = 0, margin_ = 0;
  int64_t windows_ = 0;  ///< full ones seen
  int64_t above_ = 0;    ///< in a row
  int64_t above_since_ = 0;
  double lowest_above_ = 0;  ///< of these
  int64_t skips_ = 0;        ///< in a row
  bool last_bad_ = false;    ///< its loss was not finite
};

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
