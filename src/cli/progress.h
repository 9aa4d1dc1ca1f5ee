// How far a long command has come, told on the standard error.
#pragma once

#include <chrono>
#include <cstdint>

namespace halfstep::cli {

/// One line that changes on a terminal; a plain line now and then elsewhere, so that logs stay short.
class Progress {
 public:
  /// `total_bytes` 0: unknown.
  explicit Progress(uint64_t total_bytes);

  void show(uint64_t bytes, uint64_t tokens);
  /// Clears the line on a terminal.
  void finish();
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;

  uint64_t total_bytes_;
  bool terminal_;
  bool shown_ = false;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point last_ = begin_;
};

}  // namespace halfstep::cli
