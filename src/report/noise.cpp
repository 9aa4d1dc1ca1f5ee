#include "report/noise.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace halfstep::report {
namespace {

constexpr int64_t kBatches = 10;

double mean_of(std::span<const double> values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// The 97.5% point of Student's t; between whole degrees of freedom linear in their inverse.
double t_quantile(double freedom) {
  static constexpr std::array<double, kBatches> kPoints = {12.7062, 12.7062, 4.3027, 3.1824, 2.7764,
                                                           2.5706,  2.4469,  2.3646, 2.3060, 2.2622};
  const auto below = std::clamp<size_t>(static_cast<size_t>(freedom), 1, kPoints.size() - 1);
  const size_t above = std::min(below + 1, kPoints.size() - 1);
  if (below == above) return kPoints[below];
  const double low = 1.0 / static_cast<double>(below), high = 1.0 / static_cast<double>(above);
  return kPoints[below] + (kPoints[above] - kPoints[below]) * (low - 1.0 / std::max(1.0, freedom)) / (low - high);
}

/// Correlation of each with the next. An estimate from so few is too low by (1 + 3 rho) / n (Kendall 1954), which
/// is given back; one below 0 would only make us surer, and is not believed.
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

MeanInterval mean_interval(std::span<const double> values) {
  // The oldest ones are left out if they do not fill a batch.
  const size_t length = values.size() / kBatches;
  const auto used = values.last(length * kBatches);
  const double mean = mean_of(used);
  std::array<double, kBatches> batches{};
  double squares = 0.0;
  for (size_t i = 0; i < batches.size(); ++i) {
    batches[i] = mean_of(used.subspan(i * length, length)) - mean;
    squares += batches[i] * batches[i];
  }
  const double rho = correlation(batches);
  const double worth = std::max(1.0, kBatches * (1 - rho) / (1 + rho));
  return {.mean = mean, .half_width = t_quantile(worth - 1) * std::sqrt(squares / (kBatches - 1) / worth)};
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
  for (size_t i = 0; i < values.size(); ++i) result.push_back(values[i] - slope * (static_cast<double>(i) - middle));
  return result;
}

}  // namespace halfstep::report
