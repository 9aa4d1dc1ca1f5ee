// Plots of a page as SVG, and their axes.
#pragma once

#include <string>
#include <vector>

#include "report/thin.h"

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

/// Curves are drawn in so many columns; the widest plot of the page has about two pixels for each.
inline constexpr int64_t kMostColumns = 600;
/// Areas are means, and calmer in fewer.
inline constexpr int64_t kMostAreaColumns = 120;

enum class Drawn {
  Line,
  Faint,  ///< a line behind another that says more
  Dots,
  Area,  ///< on top of the areas before it; the mean of each column
};

struct Series {
  std::string name{};  ///< may be empty if there is one series: the title says what it is
  int colour = 1;      ///< 1 to 8: see page_parts.cpp
  Drawn drawn = Drawn::Line;
  std::vector<Point> points{};
  std::vector<int64_t>
      not_finite{};  ///< steps that are told apart from the points: those of a smoothed curve
  bool in_legend = true;
};

/// A smoothed curve that tells which of its steps were not finite.
Series smooth_series(std::string name, int colour, const std::vector<Point>& points, int64_t window);

/// Steps that stand out, at the lower edge of the plot.
struct Marks {
  std::string name;  ///< "skipped"
  std::vector<int64_t> steps{};
};

struct Plot {
  std::string title;
  std::string unit{};
  AxisKind kind = AxisKind::Linear;
  bool from_zero = false;
  bool wide = false;
  int64_t first_step = 0, last_step = 0;
  std::vector<Series> series{};
  Marks marks{};
  std::vector<int64_t> resumed_after{};  ///< upright lines
  std::vector<double> guides{};          ///< level lines
  std::string caption{};                 ///< HTML below the plot
};

/// The figure; a sentence in its place if no value can be drawn.
std::string plot_html(const Plot& plot);

}  // namespace halfstep::report
