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

/// By the means of 10 to 20 batches of neighbours, counted for as many as they are worth, given how much each
/// resembles the next. docs/report.md tells how often it misses. At least kLeastValues finite numbers.
MeanInterval mean_interval(std::span<const double> values);

/// The 97.5% point of Student's t for 1 to 19 degrees of freedom, between whole ones along a line; that of
/// 19, which is a little wide, for more.
double t_quantile(double freedom);

/// Without the straight line that fits them best, and with their mean.
std::vector<double> without_trend(std::span<const double> values);

}  // namespace halfstep::report
