#include "report/thin.h"

#include <algorithm>
#include <cmath>

namespace halfstep::report {
namespace {

void take(Column& column, Point point) {
  if (column.finite + column.not_finite == 0) column.first_step = point.step;
  column.last_step = point.step;
  if (!std::isfinite(point.value)) {
    ++column.not_finite;
    return;
  }
  if (column.finite == 0) column.first = column.least = column.greatest = point;
  if (point.value < column.least.value) column.least = point;
  if (point.value > column.greatest.value) column.greatest = point;
  column.last = point;
  ++column.finite;
  column.mean += (point.value - column.mean) / static_cast<double>(column.finite);
}

/// The value at `place` of the straight line that fits the finite points best. Every window is summed anew:
/// in a running sum one loss of 1e30 would drown all that follow.
double line_at(std::span<const Point> points, int64_t place) {
  double count = 0, sum = 0, sum_x = 0;
  for (int64_t i = 0; i < std::ssize(points); ++i) {
    if (!std::isfinite(points[static_cast<size_t>(i)].value)) continue;
    count += 1;
    sum += points[static_cast<size_t>(i)].value;
    sum_x += static_cast<double>(i);
  }
  const double mean = sum / count, mean_x = sum_x / count;
  double products = 0, squares = 0;
  for (int64_t i = 0; i < std::ssize(points); ++i) {
    if (!std::isfinite(points[static_cast<size_t>(i)].value)) continue;
    const double x = static_cast<double>(i) - mean_x;
    products += x * (points[static_cast<size_t>(i)].value - mean);
    squares += x * x;
  }
  return squares == 0 ? mean : mean + products / squares * (static_cast<double>(place) - mean_x);
}

}  // namespace

std::vector<Column> thinned(std::span<const Point> points, int64_t most) {
  std::vector<Column> columns;
  if (points.empty()) return columns;
  const bool all = std::ssize(points) <= 2 * most;
  const int64_t begin = points.front().step, span = points.back().step - begin + 1;
  int64_t current = -1;
  for (const Point& point : points) {
    // In doubles: the product of two steps may not fit.
    const auto place =
        all ? current + 1
            : std::min<int64_t>(most - 1,
                                static_cast<int64_t>(static_cast<double>(point.step - begin) *
                                                     static_cast<double>(most) / static_cast<double>(span)));
    if (place != current) columns.emplace_back();
    current = place;
    take(columns.back(), point);
  }
  return columns;
}

std::vector<Point> smoothed(std::span<const Point> points, int64_t window, int64_t most) {
  const int64_t count = std::ssize(points), chosen = std::min(count, most);
  std::vector<Point> result;
  for (int64_t k = 0; k < chosen; ++k) {
    const int64_t i = chosen == 1 ? 0 : k * (count - 1) / (chosen - 1);
    // A run falls most steeply at its beginning: there, no farther to one side than to the other.
    const int64_t reach = std::min(window / 2, i), end = std::min(count, i + reach + 1);
    const Point here = points[static_cast<size_t>(i)];
    const auto around =
        points.subspan(static_cast<size_t>(i - reach), static_cast<size_t>(end - (i - reach)));
    result.push_back(
        {.step = here.step, .value = std::isfinite(here.value) ? line_at(around, reach) : here.value});
  }
  return result;
}

}  // namespace halfstep::report
