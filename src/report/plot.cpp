#include "report/plot.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/html.h"
#include "report/thin.h"
#include "words/numbers.h"

namespace halfstep::report {
namespace {

// What is drawn inside a plot, as paths of SVG.

using Columns = std::vector<Column>;

inline constexpr double kSide = 1000;  ///< of the SVG's square, which the page stretches

/// To a tenth of a unit, which is below a fifth of a pixel.
std::string coordinate(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, std::round(value * 10) / 10).ptr;
  return {text, end};
}

/// Of the curve and of its key in the legend: "line c1".
std::string style_class(const Series& series) {
  const char* const drawn = series.drawn == Drawn::Faint  ? "faint"
                            : series.drawn == Drawn::Dots ? "dots"
                            : series.drawn == Drawn::Area ? "area"
                                                          : "line";
  return std::string(drawn) + " c" + std::to_string(series.colour);
}

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

/// The areas of all series, each on top of the one before.
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

/// Level lines at the ticks, and the plot's own.
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

/// Bars at an edge, one for each row of neighbouring columns that have such a step: at least a stroke wide.
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

/// 1, 2 or 5 times a power of ten: at most `most` of them fit into the range.
double round_spacing(double range, int most) {
  const double least = range / most;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10.0 * power;
}

std::string label_of(double value, double spacing) {
  if (std::abs(value) < spacing * 1e-6) return "0";
  // As many digits as tell one tick from the next.
  const int needed = static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-9) -
                                      std::floor(std::log10(spacing) + 1e-9)) +
                     1;
  const int shown = std::clamp(needed, 1, 12);
  return std::abs(value) >= 10000 ? with_suffix(value, shown) : short_digits(value, shown);
}

std::vector<Tick> linear_ticks(double low, double high, double spacing) {
  std::vector<Tick> ticks;
  for (double i = std::ceil(low / spacing - 1e-9); i * spacing <= high + spacing * 1e-9; ++i)
    ticks.push_back({.value = i * spacing, .label = label_of(i * spacing, spacing)});
  return ticks;
}

std::string power_label(int base, int exponent) {
  return std::to_string(base) + "<sup>" + (exponent < 0 ? "−" : "") + std::to_string(std::abs(exponent)) +
         "</sup>";
}

std::string decade_label(int exponent) {
  return exponent >= -3 && exponent <= 4 ? short_digits(std::pow(10.0, exponent), 6)
                                         : power_label(10, exponent);
}

Axis log10_axis(double low, double high) {
  constexpr int kMostTicks = 6;
  Axis axis{.kind = AxisKind::Log10, .low = low / 1.1, .high = high * 1.1};
  if (high / low < 6) {  // 1, 2, 5, 10 would leave a tick or two
    axis.ticks = linear_ticks(axis.low, axis.high, round_spacing(axis.high - axis.low, 6));
    return axis;
  }
  const int first = static_cast<int>(std::floor(std::log10(axis.low)));
  const int last = static_cast<int>(std::floor(std::log10(axis.high)));
  const int every = (last - first) / kMostTicks + 1;
  for (int exponent = first; exponent <= last; exponent += every) {
    const double power = std::pow(10.0, exponent);
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (factor > 1 && axis.high / axis.low > 300) break;
      const double value = factor * power;
      if (value < axis.low || value > axis.high) continue;
      axis.ticks.push_back(
          {.value = value, .label = factor > 1 ? short_digits(value, 1) : decade_label(exponent)});
    }
  }
  return axis;
}

Axis log2_axis(double low, double high) {
  constexpr int kMostTicks = 6;
  const int first = static_cast<int>(std::floor(std::log2(low))),
            last = static_cast<int>(std::ceil(std::log2(high)));
  Axis axis{.kind = AxisKind::Log2, .low = std::ldexp(1.0, first) / 1.5, .high = std::ldexp(1.0, last) * 1.5};
  const int every = (last - first) / kMostTicks + 1;
  for (int exponent = first + ((-first % every) + every) % every; exponent <= last; exponent += every)
    axis.ticks.push_back({.value = std::ldexp(1.0, exponent), .label = power_label(2, exponent)});
  return axis;
}

}  // namespace

double Axis::place(double value) const {
  if (kind == AxisKind::Linear) return (value - low) / (high - low);
  return std::log(value / low) / std::log(high / low);
}

bool Axis::holds(double value) const {
  return std::isfinite(value) && (kind == AxisKind::Linear || value > 0);
}

Axis axis_around(AxisKind kind, double low, double high, bool from_zero) {
  constexpr int kMostSpaces = 5;
  if (kind == AxisKind::Log10) return log10_axis(low, high);
  if (kind == AxisKind::Log2) return log2_axis(low, high);
  if (from_zero) {
    low = std::min(low, 0.0);
    high = std::max(high, 0.0);
  }
  // A constant gets room around it, so that it is a line and not an edge.
  if (high - low <= 1e-12 * std::max(std::abs(low), std::abs(high))) {
    const double room = high == 0 ? 1.0 : std::abs(high) * 0.1;
    high += room;
    if (!from_zero) low -= room;
  }
  const double spacing = round_spacing(high - low, kMostSpaces);
  // The last tick below or above the values, whichever wastes less than a third of a space.
  const double margin = 0.04 * (high - low);
  Axis axis{.low = from_zero && low == 0 ? 0.0 : low - margin,
            .high = from_zero && high == 0 ? 0.0 : high + margin};
  axis.ticks = linear_ticks(axis.low, axis.high, spacing);
  return axis;
}

Axis axis_of_steps(double first, double last) {
  constexpr int kMostSpaces = 6;
  Axis axis{.low = first, .high = last > first ? last : first + 1};
  const double spacing = std::max(1.0, round_spacing(axis.high - axis.low, kMostSpaces));
  axis.ticks = linear_ticks(axis.low, axis.high, spacing);
  return axis;
}

namespace {

std::string key(const std::string& classes, const std::string& name, bool has_value) {
  return "<li><span class=\"key " + classes + "\"></span>" + name + (has_value ? " <output></output>" : "") +
         "</li>";
}

std::string numbers(const Columns& columns, auto value) {
  std::string text = "[";
  for (const Column& column : columns) text += (text.size() > 1 ? "," : "") + value(column);
  return text + "]";
}

/// What the plot shows, for the read-out and for whoever wants the numbers.
std::string data_json(const Plot& plot, const std::vector<Columns>& columns) {
  std::string text =
      "{\"title\":" + json_text(plot.title) + ",\"unit\":" + json_text(plot.unit) + ",\"series\":[";
  for (size_t i = 0; i < plot.series.size(); ++i) {
    const Columns& these = columns[i];
    const bool area = plot.series[i].drawn == Drawn::Area;
    const bool single =
        std::ranges::all_of(these, [](const Column& c) { return c.first_step == c.last_step; });
    const auto finite_or_null = [](const Column& c, double value) {
      return c.finite > 0 ? json_number(value) : std::string("null");
    };
    text += (i > 0 ? ",\n" : "\n") + std::string("{\"name\":") + json_text(plot.series[i].name) +
            ",\"steps\":" + numbers(these, [](const Column& c) { return std::to_string(c.first_step); });
    if (!single)
      text += ",\"to\":" + numbers(these, [](const Column& c) { return std::to_string(c.last_step); });
    if (single || area) {
      text += std::string(single ? ",\"value\":" : ",\"mean\":") +
              numbers(these, [&](const Column& c) { return finite_or_null(c, c.mean); });
    } else {
      text +=
          ",\"least\":" + numbers(these, [&](const Column& c) { return finite_or_null(c, c.least.value); });
      text += ",\"greatest\":" +
              numbers(these, [&](const Column& c) { return finite_or_null(c, c.greatest.value); });
    }
    text += "}";
  }
  return text + "]}";
}

/// What is not on the canvas although it is in the log.
struct OffCanvas {
  std::vector<int64_t> not_finite{};
  int64_t below = 0;  // 0 or less on a logarithmic axis
};

struct Extent {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  OffCanvas off{};
};

Extent extent_of(const Plot& plot, const std::vector<Columns>& columns) {
  Extent extent;
  const auto include = [&](double value) {
    extent.low = std::min(extent.low, value);
    extent.high = std::max(extent.high, value);
  };
  for (const double value : plot.guides) include(value);
  const bool logarithmic = plot.kind != AxisKind::Linear;
  for (size_t i = 0; i < plot.series.size(); ++i) {
    if (plot.series[i].drawn == Drawn::Area) continue;
    extent.off.not_finite.insert(extent.off.not_finite.end(), plot.series[i].not_finite.begin(),
                                 plot.series[i].not_finite.end());
    for (const Point& point : plot.series[i].points) {
      if (!std::isfinite(point.value))
        extent.off.not_finite.push_back(point.step);
      else if (logarithmic && point.value <= 0)
        ++extent.off.below;
      else
        include(point.value);
    }
  }
  if (plot.series.front().drawn == Drawn::Area)
    for (size_t k = 0; k < columns.front().size(); ++k) {
      double sum = 0.0;
      for (const Columns& these : columns) sum += these[k].finite > 0 ? these[k].mean : 0.0;
      include(sum);
    }
  std::ranges::sort(extent.off.not_finite);
  const auto again = std::ranges::unique(extent.off.not_finite);
  extent.off.not_finite.erase(again.begin(), again.end());
  return extent;
}

std::string legend(const Plot& plot, const OffCanvas& off) {
  std::string html = "<ul class=\"legend\">";
  for (const Series& series : plot.series)
    html += !series.in_legend     ? "<li hidden><output></output></li>"
            : series.name.empty() ? "<li><output></output></li>"
                                  : key(style_class(series), escaped(series.name), true);
  if (!plot.marks.steps.empty())
    html +=
        key("mark", escaped(plot.marks.name) + ": " + counted(std::ssize(plot.marks.steps), "step"), false);
  if (!off.not_finite.empty())
    html += key("bad", "NaN or Inf: " + counted(std::ssize(off.not_finite), "step"), false);
  if (!plot.resumed_after.empty() && plot.wide) html += key("resumed", "resumed", false);
  return html + "</ul>";
}

std::string frame(const Canvas& canvas, const Plot& plot, const std::string& drawing) {
  std::string html = "<div class=\"frame\" data-first=\"" + std::to_string(plot.first_step) +
                     "\" data-last=\"" + std::to_string(plot.last_step) + "\"><div class=\"y\">";
  for (const Tick& tick : canvas.values().ticks)
    html += "<span style=\"bottom:" + coordinate(100 * canvas.values().place(tick.value)) + "%\">" +
            tick.label + "</span>";
  html +=
      "</div><div class=\"box\"><svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" role=\"img\" "
      "xmlns=\"http://www.w3.org/2000/svg\" aria-label=\"" +
      escaped(plot.title) + " by step\">\n" + drawing +
      "</svg></div><div class=\"corner\">step</div><div class=\"x\">";
  for (const Tick& tick : canvas.steps().ticks) {
    const double place = canvas.steps().place(tick.value);
    html += "<span style=\"left:" + coordinate(100 * place) + "%\"" +
            (place > 0.97   ? " class=\"end\""
             : place < 0.03 ? " class=\"begin\""
                            : "") +
            ">" + tick.label + "</span>";
  }
  return html + "</div></div>\n";
}

std::string off_canvas_sentence(const OffCanvas& off) {
  if (off.below == 0) return "";
  return "<p class=\"note\">" + counted(off.below, "value") +
         " of 0 cannot be shown on this logarithmic axis.</p>\n";
}

}  // namespace

Series smooth_series(std::string name, int colour, const std::vector<Point>& points, int64_t window) {
  Series series{
      .name = std::move(name), .colour = colour, .points = smoothed(points, window, 2 * kMostColumns)};
  std::erase_if(series.points, [](const Point& point) { return !std::isfinite(point.value); });
  for (const Point& point : points)
    if (!std::isfinite(point.value)) series.not_finite.push_back(point.step);
  return series;
}

std::string plot_html(const Plot& plot) {
  std::vector<Columns> columns;
  for (const Series& series : plot.series)
    columns.push_back(thinned(series.points, series.drawn == Drawn::Area ? kMostAreaColumns : kMostColumns));
  const Extent extent = extent_of(plot, columns);
  const std::string heading =
      "<figure class=\"plot" + std::string(plot.wide ? " wide" : "") + "\"><figcaption><h3>" +
      escaped(plot.title) +
      (plot.unit.empty() ? "" : " <span class=\"unit\">" + escaped(plot.unit) + "</span>") + "</h3>";
  const std::string below = plot.caption.empty() ? "" : "<p class=\"note\">" + plot.caption + "</p>\n";
  if (!(extent.low <= extent.high))
    return heading + "</figcaption><p class=\"none\">No finite value in " +
           counted(std::ssize(extent.off.not_finite), "step") + ".</p>" + below + "</figure>\n";
  const Canvas canvas(
      axis_of_steps(static_cast<double>(plot.first_step), static_cast<double>(plot.last_step)),
      axis_around(plot.kind, extent.low, extent.high, plot.from_zero));
  std::string drawing = grid(canvas, plot);
  if (plot.series.front().drawn == Drawn::Area)
    drawing += area_paths(canvas, plot.series, columns);
  else
    for (size_t i = 0; i < plot.series.size(); ++i) drawing += line_path(canvas, plot.series[i], columns[i]);
  if (!plot.marks.steps.empty()) drawing += bars(canvas, "mark", plot.marks.steps, false);
  if (!extent.off.not_finite.empty()) drawing += bars(canvas, "bad", extent.off.not_finite, true);
  return heading + legend(plot, extent.off) + "</figcaption>" + frame(canvas, plot, drawing) + below +
         off_canvas_sentence(extent.off) + "<script type=\"application/json\">" + data_json(plot, columns) +
         "</script></figure>\n";
}

}  // namespace halfstep::report
