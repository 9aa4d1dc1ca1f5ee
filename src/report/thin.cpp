#include "report/thin.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

}  // namespace

std::vector<Column> thinned(std::span<const Point> points, int64_t most) {
  std::vector<Column> columns;
  if (points.empty()) return columns;
  const bool all = std::ssize(points) <= most;
  const int64_t begin = points.front().step, span = points.back().step - begin + 1;
  int64_t current = -1;
  for (const Point& point : points) {
    // In doubles: the product of two steps may not fit.
    const auto place = all ? current + 1
                           : std::min<int64_t>(most - 1, static_cast<int64_t>(static_cast<double>(point.step - begin) *
                                                                               static_cast<double>(most) /
                                                                               static_cast<double>(span)));
    if (place != current) columns.emplace_back();
    current = place;
    take(columns.back(), point);
  }
  return columns;
}

// Every window is summed anew: in a running sum one loss of 1e30 would drown all that follow.
std::vector<Point> smoothed(std::span<const Point> points, int64_t window, int64_t most) {
  const int64_t half = window / 2, count = std::ssize(points), chosen = std::min(count, most);
  std::vector<Point> result;
  for (int64_t k = 0; k < chosen; ++k) {
    const int64_t i = chosen == 1 ? 0 : k * (count - 1) / (chosen - 1);
    // As far to one side as to the other, so that the ends of a falling curve are not bent.
    const int64_t reach = std::min({half, i, count - 1 - i});
    double sum = 0.0;
    int64_t summed = 0;
    for (const Point& point : points.subspan(static_cast<size_t>(i - reach), static_cast<size_t>(2 * reach + 1))) {
      if (!std::isfinite(point.value)) continue;
      sum += point.value;
      ++summed;
    }
    result.push_back({.step = points[static_cast<size_t>(i)].step,
                      .value = summed == 0 ? std::numeric_limits<double>::quiet_NaN()
                                           : sum / static_cast<double>(summed)});
  }
  return result;
}

}  // namespace halfstep::report
