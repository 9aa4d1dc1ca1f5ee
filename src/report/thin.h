// Many points as few columns, such that no spike is lost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace halfstep::report {

struct Point {
  int64_t step;
  double value;
};

/// The points of neighbouring steps: first, least, greatest and last of the finite ones. Drawn in the order
/// of their steps these look as all of them would, on a screen whose pixels are as wide as the column.
struct Column {
  int64_t first_step = 0, last_step = 0;
  int64_t finite = 0, not_finite = 0;
  Point first{}, least{}, greatest{}, last{};  ///< if any is finite
  double mean = 0.0;                           ///< of the finite ones
};

/// At most `most` columns of equal width from the first step to the last; a column a point if there are no
/// more than twice as many: those are drawn as cheaply.
std::vector<Column> thinned(std::span<const Point> points, int64_t most);

/// At most `most` of the points, evenly chosen, smoothed over the finite ones half a window to each side: a
/// straight line is laid through them, so that where one side is missing a falling curve goes on falling. NaN
/// stays NaN.
std::vector<Point> smoothed(std::span<const Point> points, int64_t window, int64_t most);

}  // namespace halfstep::report
