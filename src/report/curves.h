// What is drawn inside a plot, as paths of SVG.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/axis.h"
#include "report/plot.h"
#include "report/thin.h"

namespace halfstep::report {

using Columns = std::vector<Column>;

inline constexpr double kSide = 1000;  ///< of the SVG's square, which the page stretches

/// To a tenth of a unit, which is below a fifth of a pixel.
std::string coordinate(double value);

class Canvas {
 public:
  Canvas(Axis steps, Axis values) : steps_(std::move(steps)), values_(std::move(values)) {}

  const Axis& steps() const { return steps_; }
  const Axis& values() const { return values_; }
  double x(double step) const { return kSide * steps_.place(step); }
  double y(double value) const { return kSide * (1 - values_.place(value)); }
  std::string at(double step, double value) const { return coordinate(x(step)) + " " + coordinate(y(value)); }

 private:
  Axis steps_, values_;
};

/// Of the curve and of its key in the legend: "line c1".
std::string style_class(const Series& series);

std::string line_path(const Canvas& canvas, const Series& series, const Columns& columns);

/// The areas of all series, each on top of the one before.
std::string area_paths(const Canvas& canvas, const std::vector<Series>& series,
                       const std::vector<Columns>& columns);

/// Level lines at the ticks, and the plot's own.
std::string grid(const Canvas& canvas, const Plot& plot);

/// Bars at an edge, one for each row of neighbouring columns that have such a step: at least a stroke wide.
std::string bars(const Canvas& canvas, std::string_view css, const std::vector<int64_t>& steps, bool at_top);

}  // namespace halfstep::report
