// Where values lie along an axis, and which of them are written beside it.
#pragma once

#include <string>
#include <vector>

namespace halfstep::report {

enum class AxisKind { Linear, Log10, Log2 };

struct Tick {
  double value;
  std::string label;  ///< HTML
};

struct Axis {
  AxisKind kind = AxisKind::Linear;
  double low = 0.0, high = 1.0;
  std::vector<Tick> ticks{};

  /// 0 at `low`, 1 at `high`. On a logarithmic axis the value must be above 0.
  double place(double value) const;
  bool holds(double value) const;  ///< finite, and above 0 if it must be
};

/// Around finite values from `low` to `high`, with three to seven ticks at round numbers. `from_zero` takes 0
/// in.
Axis axis_around(AxisKind kind, double low, double high, bool from_zero);

/// Whole steps from the first to the last, without room beside them.
Axis axis_of_steps(double first, double last);

}  // namespace halfstep::report
