#include "report/noise.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace halfstep::report {
namespace {

constexpr size_t kMostBatches = 20;

double mean_of(std::span<const double> values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// Correlation of each with the next. An estimate from so few is too low by (1 + 3 rho) / n (Kendall 1954),
/// which is given back; one below 0 would only make us surer, and is not believed.
double correlation(std::span<const double> centred) {
  constexpr double kMost = 0.9;
  double squares = 0.0, products = 0.0;
  for (size_t i = 0; i < centred.size(); ++i) {
    squares += centred[i] * centred[i];
    if (i > 0) products += centred[i] * centred[i - 1];
  }
  if (squares == 0) return 0.0;
  const double rho = products / squares;
  return std::clamp(rho + (1 + 3 * rho) / static_cast<double>(centred.size()), 0.0, kMost);
}

}  // namespace

double t_quantile(double freedom) {
  static constexpr std::array<double, 19> kPoints = {12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646,
                                                     2.3060,  2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
                                                     2.1314,  2.1199, 2.1098, 2.1009, 2.0930};
  const double place = std::clamp(freedom - 1, 0.0, static_cast<double>(kPoints.size() - 1));
  const auto below = static_cast<size_t>(place), above = std::min(below + 1, kPoints.size() - 1);
  return kPoints[below] + (kPoints[above] - kPoints[below]) * (place - static_cast<double>(below));
}

MeanInterval mean_interval(std::span<const double> values) {
  // Fewer are not counted: the interval would grow without bound where chance makes a few batches alike.
  constexpr double kLeastFreedom = 4;
  // Of 21 to 39 two each, or 20 would count and the others not. The oldest ones are left out if they do not
  // fill a batch.
  const size_t length = values.size() > kMostBatches ? std::max(values.size() / kMostBatches, size_t{2}) : 1;
  const size_t count = std::min(kMostBatches, values.size() / length);
  const auto used = values.last(length * count);
  const double mean = mean_of(used);
  std::vector<double> batches;
  double squares = 0.0;
  for (size_t i = 0; i < count; ++i) {
    batches.push_back(mean_of(used.subspan(i * length, length)) - mean);
    squares += batches.back() * batches.back();
  }
  const double rho = correlation(batches);
  const double worth = std::max(1.0, static_cast<double>(count) * (1 - rho) / (1 + rho));
  const double variance = squares / static_cast<double>(count - 1) / worth;
  return {.mean = mean, .half_width = t_quantile(std::max(worth - 1, kLeastFreedom)) * std::sqrt(variance)};
}

std::vector<double> without_trend(std::span<const double> values) {
  const double mean = mean_of(values), middle = 0.5 * static_cast<double>(values.size() - 1);
  double products = 0.0, squares = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double x = static_cast<double>(i) - middle;
    products += x * (values[i] - mean);
    squares += x * x;
  }
  const double slope = squares > 0 ? products / squares : 0.0;
  std::vector<double> result;
  for (size_t i = 0; i < values.size(); ++i)
    result.push_back(values[i] - slope * (static_cast<double>(i) - middle));
  return result;
}

}  // namespace halfstep::report
