#include "report/plot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "report/curves.h"
#include "report/html.h"
#include "words/numbers.h"

namespace halfstep::report {
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
