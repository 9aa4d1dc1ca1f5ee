// Where the time of a step goes.
#pragma once

#include <chrono>

namespace halfstep::train {

class PhaseClock {
 public:
  using Clock = std::chrono::steady_clock;

  /// Adds what passed since the last lap to `seconds`.
  void lap(double& seconds) {
    const auto now = Clock::now();
    seconds += std::chrono::duration<double>(now - lap_).count();
    lap_ = now;
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  Clock::time_point begin_ = Clock::now();
  Clock::time_point lap_ = begin_;
};

}  // namespace halfstep::train
