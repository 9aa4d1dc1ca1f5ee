// How sure a mean of numbers is that depend on those before them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace halfstep::report {

/// Fewer numbers than this tell nothing of their noise.
inline constexpr int64_t kLeastValues = 10;

struct MeanInterval {
  double mean = 0.0;
  double half_width = 0.0;  ///< of the 95% interval
};

/// By the means of twenty batches of neighbours, counted for as many as they are worth, given how much each
/// resembles the next. docs/report.md tells how often it misses. At least kLeastValues finite numbers.
MeanInterval mean_interval(std::span<const double> values);

/// Without the straight line that fits them best, and with their mean.
std::vector<double> without_trend(std::span<const double> values);

}  // namespace halfstep::report
