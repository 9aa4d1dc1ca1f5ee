#include "report/curves.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace halfstep::report {
namespace {

constexpr double kMarkHeight = 45;

std::string path_element(const Series& series, const std::string& d) {
  return "<path class=\"" + style_class(series) + "\" d=\"" + d + "\"/>\n";
}

/// First, least, greatest and last of each column in the order of their steps, each once.
std::vector<Point> corners(const Column& column) {
  std::vector<Point> points = {column.first, column.least, column.greatest, column.last};
  std::ranges::sort(points, {}, &Point::step);
  const auto same = [](Point a, Point b) { return a.step == b.step; };
  points.erase(std::unique(points.begin(), points.end(), same), points.end());
  return points;
}

}  // namespace

std::string coordinate(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, std::round(value * 10) / 10).ptr;
  return {text, end};
}

std::string style_class(const Series& series) {
  const char* const drawn = series.drawn == Drawn::Faint  ? "faint"
                            : series.drawn == Drawn::Dots ? "dots"
                            : series.drawn == Drawn::Area ? "area"
                                                          : "line";
  return std::string(drawn) + " c" + std::to_string(series.colour);
}

std::string line_path(const Canvas& canvas, const Series& series, const Columns& columns) {
  std::string d;
  bool pen_down = false;
  for (const Column& column : columns) {
    if (column.finite == 0) {
      pen_down = false;
      continue;
    }
    for (const Point& point : corners(column)) {
      if (!canvas.values().holds(point.value)) continue;
      const bool dot = series.drawn == Drawn::Dots;
      d += (pen_down && !dot ? "L" : "M") + canvas.at(static_cast<double>(point.step), point.value);
      if (!pen_down || dot) d += "h0";  // round ends make a dot of it, should it stand alone
      pen_down = true;
    }
  }
  return path_element(series, d);
}

std::string area_paths(const Canvas& canvas, const std::vector<Series>& series,
                       const std::vector<Columns>& columns) {
  std::string html;
  std::vector<double> floor(columns.front().size(), 0.0);
  for (size_t i = 0; i < series.size(); ++i) {
    std::string d, back;
    for (size_t k = 0; k < floor.size(); ++k) {
      const Column& column = columns[i][k];
      const double step = 0.5 * static_cast<double>(column.first_step + column.last_step);
      back.insert(0, "L" + canvas.at(step, floor[k]));
      floor[k] += column.finite > 0 ? column.mean : 0.0;
      d += (k == 0 ? "M" : "L") + canvas.at(step, floor[k]);
    }
    html += path_element(series[i], d + back + "Z");
  }
  return html;
}

std::string grid(const Canvas& canvas, const Plot& plot) {
  std::string d, resumed, guides;
  for (const Tick& tick : canvas.values().ticks) d += "M0 " + coordinate(canvas.y(tick.value)) + "H1000";
  for (const int64_t step : plot.resumed_after)
    resumed += "M" + coordinate(canvas.x(static_cast<double>(step))) + " 0V1000";
  for (const double value : plot.guides) guides += "M0 " + coordinate(canvas.y(value)) + "H1000";
  std::string html = "<path class=\"grid\" d=\"" + d + "\"/>\n";
  if (!resumed.empty()) html += "<path class=\"resumed\" d=\"" + resumed + "\"/>\n";
  if (!guides.empty()) html += "<path class=\"resumed\" d=\"" + guides + "\"/>\n";
  return html;
}

std::string bars(const Canvas& canvas, std::string_view css, const std::vector<int64_t>& steps, bool at_top) {
  constexpr double kColumn = kSide / static_cast<double>(kMostColumns);
  const std::string inner = coordinate(at_top ? kMarkHeight : kSide - kMarkHeight),
                    edge = at_top ? "0" : "1000";
  std::string d;
  for (size_t i = 0; i < steps.size();) {
    const double begin = canvas.x(static_cast<double>(steps[i]));
    double end = begin;
    for (; i < steps.size() && canvas.x(static_cast<double>(steps[i])) - end <= kColumn; ++i)
      end = canvas.x(static_cast<double>(steps[i]));
    d += "M" + coordinate(begin) + " " + edge + "V" + inner + "H" + coordinate(end) + "V" + edge + "Z";
  }
  return "<path class=\"" + std::string(css) + "\" d=\"" + d + "\"/>\n";
}

}  // namespace halfstep::report
