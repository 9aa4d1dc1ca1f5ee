#include "support/statistics.h"

#include <halfstep/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace bench {
namespace {

double quantile(std::vector<double> values, double q) {
  HALFSTEP_CHECK(!values.empty(), "no samples");
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

/// 95th percentile of Student's t for 1 to 31 degrees of freedom, as in any printed table.
constexpr std::array<double, 31> kT95 = {6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860,
                                         1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746,
                                         1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711,
                                         1.708, 1.706, 1.703, 1.701, 1.699, 1.697, 1.696};

}  // namespace

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

double standard_error_of_median(const std::vector<double>& values) {
  const double spread = quantile(values, 0.75) - quantile(values, 0.25);
  return 1.2533 / 1.349 * spread / std::sqrt(static_cast<double>(values.size()));
}

Interval mean_with_90_percent(const std::vector<double>& values) {
  HALFSTEP_CHECK(values.size() >= 2 && values.size() <= kT95.size() + 1, "an interval needs 2 to ",
                 kT95.size() + 1, " values and got ", values.size());
  const double count = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double half = kT95[values.size() - 2] * std::sqrt(squares / (count - 1) / count);
  return {.mean = mean, .low = mean - half, .high = mean + half};
}

}  // namespace bench
