#include "report/svg_figure.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "report/html.h"
#include "words/numbers.h"

namespace halfstep::report {
namespace {

constexpr double kWidth = 760, kLeft = 72, kRight = 150, kTitle = 24, kHeight = 220, kGap = 26, kBelow = 40;
// Told apart by people who see few colours too, and on both backgrounds.
constexpr const char* kColours[] = {"#3b7dd8", "#d9822b", "#2f9e6b", "#b5559e", "#7a7f87"};
constexpr const char* kFigureStyle =
    "<style>\n"
    "  svg { font: 12px system-ui, sans-serif; color: #1f2328; }\n"
    "  @media (prefers-color-scheme: dark) { svg { color: #e6edf3; } }\n"
    "  text { fill: currentColor; }\n"
    "  .grid { stroke: currentColor; stroke-opacity: 0.15; fill: none; }\n"
    "  .line { fill: none; stroke-width: 2; stroke-linejoin: round; }\n"
    "</style>\n";

std::string at(double value) { return short_digits(std::round(value * 10) / 10, 6); }

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\" text-anchor=\"" + anchor + "\">" + text + "</text>\n";
}

/// A tick's label is HTML, whose powers SVG writes in another way.
std::string label_of(const Tick& tick) {
  const size_t begin = tick.label.find("<sup>"), end = tick.label.find("</sup>");
  if (begin == std::string::npos || end == std::string::npos) return tick.label;
  return tick.label.substr(0, begin) + "<tspan dy=\"-4\" font-size=\"9\">" +
         tick.label.substr(begin + 5, end - begin - 5) + "</tspan>";
}

Axis upright_axis(const FigurePanel& panel) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const FigureLine& line : panel.lines)
    for (const auto& [x, y] : line.points)
      if (std::isfinite(y)) low = std::min(low, y), high = std::max(high, y);
  if (!(low <= high)) low = 0, high = 1;
  return axis_around(panel.kind, low, high, panel.from_zero);
}

std::string drawn(const FigurePanel& panel, double top, const Axis& across) {
  const Axis upright = upright_axis(panel);
  const double first = top + kTitle, last = first + kHeight, right = kWidth - kRight;
  const auto x_at = [&](double x) { return kLeft + (right - kLeft) * across.place(x); };
  const auto y_at = [&](double y) { return last - kHeight * upright.place(y); };
  std::string svg = "<text x=\"" + at(kLeft) + "\" y=\"" + at(top + 14) + "\" font-weight=\"600\">" +
                    escaped(panel.title) + "</text>\n";
  std::string grid;
  for (const Tick& tick : upright.ticks) {
    grid += "M" + at(kLeft) + " " + at(y_at(tick.value)) + "H" + at(right);
    svg += text_at(kLeft - 6, y_at(tick.value) + 4, "end", label_of(tick));
  }
  for (const Tick& tick : across.ticks) grid += "M" + at(x_at(tick.value)) + " " + at(first) + "V" + at(last);
  svg += "<path class=\"grid\" d=\"" + grid + "\"/>\n";
  for (std::size_t i = 0; i < panel.lines.size(); ++i) {
    const char* const colour = kColours[i % std::size(kColours)];
    std::string path, dots;
    for (const auto& [x, y] : panel.lines[i].points) {
      if (!std::isfinite(y)) continue;
      path += (path.empty() ? "M" : "L") + at(x_at(x)) + " " + at(y_at(y));
      dots +=
          "<circle cx=\"" + at(x_at(x)) + "\" cy=\"" + at(y_at(y)) + "\" r=\"2.5\" fill=\"" + colour + "\"/>";
    }
    if (path.empty()) continue;
    svg += "<path class=\"line\" stroke=\"" + std::string(colour) + "\" d=\"" + path + "\"/>" + dots + "\n";
    const double key = first + 12 + 18 * static_cast<double>(i);
    svg += "<path class=\"line\" stroke=\"" + std::string(colour) + "\" d=\"M" + at(right + 12) + " " +
           at(key - 4) + "h18\"/>" + text_at(right + 36, key, "start", escaped(panel.lines[i].name));
  }
  return svg;
}

}  // namespace

std::string svg_figure(const std::vector<FigurePanel>& panels, const Axis& across, const std::string& title) {
  std::string parts;
  double top = 0;
  for (const FigurePanel& panel : panels) {
    parts += drawn(panel, top, across);
    top += kTitle + kHeight + kGap;
  }
  const double right = kWidth - kRight, bottom = top - kGap;
  for (const Tick& tick : across.ticks)
    parts +=
        text_at(kLeft + (right - kLeft) * across.place(tick.value), bottom + 16, "middle", label_of(tick));
  parts += text_at((kLeft + right) / 2, bottom + 34, "middle", escaped(title));
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + at(kWidth) + " " + at(bottom + kBelow) +
         "\" role=\"img\">\n<title>" + escaped(title) + "</title>\n" + kFigureStyle + parts + "</svg>\n";
}

}  // namespace halfstep::report
