// Line plots as a picture of their own, for a page that is not a report: one above the other, over one axis.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/plot.h"

namespace halfstep::report {

struct FigureLine {
  std::string name{};
  std::vector<std::pair<double, double>> points{};  ///< in the order in which they are joined
};

struct FigurePanel {
  std::string title{};
  bool from_zero = false;
  AxisKind kind = AxisKind::Linear;
  std::vector<FigureLine> lines{};
};

/// An SVG file, readable on white and on black. `across` is the axis below all panels, whose points lie on
/// it. Points that are not finite are left out.
std::string svg_figure(const std::vector<FigurePanel>& panels, const Axis& across, const std::string& title);

}  // namespace halfstep::report
