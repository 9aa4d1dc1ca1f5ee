// Medians, spreads, and the interval of a mean.
#pragma once

#include <vector>

namespace bench {

double median(std::vector<double> values);

/// From the quartiles, as for a normal distribution: 1.2533 sigma / sqrt(n), and sigma = spread / 1.349.
double standard_error_of_median(const std::vector<double>& values);

struct Interval {
  double mean = 0;
  double low = 0;
  double high = 0;
};

/// Mean and two-sided 90% t-interval: both ends together are the two one-sided tests at 5%.
Interval mean_with_90_percent(const std::vector<double>& values);

}  // namespace bench
