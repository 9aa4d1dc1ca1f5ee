// When a run will be done.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

namespace halfstep::cli {

/// Steps take the median of the last ones, which an odd one does not move. What the run pauses for between
/// steps (evaluations, samples, checkpoints) is counted apart and spread over the steps so far: they will
/// come again. A pause that has not come yet is not foreseen.
class StepPace {
 public:
  StepPace() = default;
  StepPace(int64_t steps, int64_t steps_done);

  /// Steps may be left out (`log.every`): what is between two of them is divided.
  void step(int64_t step, double seconds);
  /// Something happened after the latest step that may have taken its time.
  void pause();

  /// After the latest step; nothing before the second, and nothing after the last.
  std::optional<double> seconds_left() const;

 private:
  double median_seconds() const;

  int64_t steps_ = 0;
  int64_t first_step_ = 0;  // the one before the first that was timed
  int64_t latest_step_ = 0;
  double latest_seconds_ = 0.0;
  bool started_ = false;
  bool paused_ = false;
  double pauses_seconds_ = 0.0;
  int64_t latest_pause_step_ = 0;
  std::deque<double> recent_seconds_{};  // of one step
};

}  // namespace halfstep::cli
