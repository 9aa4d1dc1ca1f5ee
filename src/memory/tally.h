// Live and peak bytes by class.
#pragma once

#include <halfstep/memory.h>

#include <algorithm>

namespace halfstep {

/// Not thread-safe: its owner holds a lock, so that a breakdown at the peak is one that was.
class Tally {
 public:
  void add(MemoryClass memory_class, std::size_t bytes) {
    of(live_, memory_class) += bytes;
    live_.total += bytes;
    raise_own_peak(memory_class);
    if (live_.total > at_peak_.total) at_peak_ = live_;
  }

  void remove(MemoryClass memory_class, std::size_t bytes) {
    of(live_, memory_class) -= bytes;
    live_.total -= bytes;
  }

  /// The total does not move, so neither does its peak.
  void move(MemoryClass from, MemoryClass to, std::size_t bytes) {
    of(live_, from) -= bytes;
    of(live_, to) += bytes;
    raise_own_peak(to);
  }

  void reset_peak() { class_peaks_ = at_peak_ = live_; }

  const MemoryAmounts& live() const { return live_; }
  const MemoryAmounts& at_peak() const { return at_peak_; }
  MemoryAmounts class_peaks() const {
    MemoryAmounts peaks = class_peaks_;
    peaks.total = at_peak_.total;
    return peaks;
  }

 private:
  static std::size_t& of(MemoryAmounts& amounts, MemoryClass memory_class) {
    return amounts.by_class[static_cast<std::size_t>(memory_class)];
  }
  void raise_own_peak(MemoryClass memory_class) {
    auto& peak = of(class_peaks_, memory_class);
    peak = std::max(peak, of(live_, memory_class));
  }

  MemoryAmounts live_, at_peak_, class_peaks_;
};

}  // namespace halfstep
