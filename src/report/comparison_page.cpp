#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "report/comparison.h"
#include "report/html.h"
#include "report/run_plots.h"
#include "report/run_report.h"
#include "words/numbers.h"

namespace halfstep {
namespace {

using namespace report;
using Runs = std::span<const RunHistory>;

constexpr size_t kMostRuns = 8;  // that many colours can be told apart
constexpr size_t kMostKeys = 300;
constexpr int64_t kSmoothedParts = 50;

int colour_of(size_t run) { return static_cast<int>(run) + 1; }

Plot plot_over(Runs runs, const std::string& title) {
  Plot plot{.title = title};
  plot.first_step = step_range(runs.front()).first;
  for (const RunHistory& run : runs) {
    const auto [first, last] = step_range(run);
    plot.first_step = std::min(plot.first_step, first);
    plot.last_step = std::max(plot.last_step, last);
  }
  return plot;
}

std::vector<Point> from_step(std::vector<Point> points, int64_t step) {
  std::erase_if(points, [&](const Point& point) { return point.step < step; });
  return points;
}

/// Curves of noise hide each other; smoothed ones do not.
Series smooth_of(const RunHistory& run, size_t index, const std::vector<Point>& points) {
  return smooth_series(run.name, colour_of(index), points, std::ssize(points) / kSmoothedParts | 1);
}

std::string loss_plot(Runs runs, const std::string& title, int64_t first_step, bool wide) {
  Plot plot = plot_over(runs, title);
  plot.unit = loss_unit(runs.front());
  plot.wide = wide;
  plot.first_step = std::max(plot.first_step, first_step);
  plot.caption = "Lines: training, smoothed over a fiftieth of the run. Dots: held out.";
  std::vector<Series> dots;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto loss = points_of(runs[i], [](const StepRecord& r) { return std::optional(r.loss); });
    Series curve = smooth_of(runs[i], i, loss);
    curve.points = from_step(std::move(curve.points), plot.first_step);
    std::erase_if(curve.not_finite, [&](int64_t step) { return step < plot.first_step; });
    plot.series.push_back(std::move(curve));
    auto held_out = from_step(evaluation_points(runs[i]), plot.first_step);
    if (!held_out.empty())
      dots.push_back({.name = runs[i].name + ", held out",
                      .colour = colour_of(i),
                      .drawn = Drawn::Dots,
                      .points = std::move(held_out),
                      .in_legend = false});
  }
  plot.series.insert(plot.series.end(), dots.begin(), dots.end());
  return plot_html(plot);
}

/// Step by step, of the runs that saw the same batches as the first.
std::string difference_plot(Runs runs) {
  Plot plot = plot_over(runs, "Difference from " + runs.front().name);
  plot.unit = "% of its loss, smoothed";
  plot.wide = true;
  plot.guides = {100 * RunComparison::kMargin, -100 * RunComparison::kMargin};
  std::map<int64_t, double> reference;
  for (const StepRecord& record : runs.front().steps) reference[record.step] = record.loss;
  std::string unpaired;
  for (size_t i = 1; i < runs.size(); ++i) {
    if (!why_not_the_same_batches(runs.front(), runs[i]).empty()) {
      unpaired += (unpaired.empty() ? "" : ", ") + escaped(runs[i].name);
      continue;
    }
    auto points = points_of(runs[i], [&](const StepRecord& record) -> std::optional<double> {
      const auto same_step = reference.find(record.step);
      if (same_step == reference.end()) return {};
      return 100 * (record.loss - same_step->second) / std::abs(same_step->second);
    });
    plot.series.push_back(smooth_of(runs[i], i, points));
  }
  plot.caption = "Dashed: the margin of " + percent(RunComparison::kMargin) + " that matters in practice.";
  if (!unpaired.empty()) plot.caption += " Not here, for other batches: " + unpaired + ".";
  return plot.series.empty() ? "" : plot_html(plot);
}

std::string overlay(Runs runs, Plot plot, bool smoothly, auto value) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto points = points_of(runs[i], value);
    if (points.empty()) continue;
    if (smoothly)
      plot.series.push_back(smooth_of(runs[i], i, points));
    else
      plot.series.push_back({.name = runs[i].name, .colour = colour_of(i), .points = points});
  }
  return plot.series.empty() ? "" : plot_html(plot);
}

std::string plots(Runs runs, const RunComparison& comparison) {
  Plot norm = plot_over(runs, "Gradient norm");
  norm.kind = AxisKind::Log10;
  norm.unit = "L2, smoothed";
  Plot scale = plot_over(runs, "Loss scale");
  scale.unit = kLossScaleUnit;
  scale.kind = AxisKind::Log2;
  Plot speed = plot_over(runs, "Speed");
  speed.unit = runs.front().sittings.back().header.unit + "/s, smoothed";
  speed.from_zero = true;
  Plot rate = plot_over(runs, "Learning rate");
  rate.unit = kLearningRateUnit;
  rate.from_zero = true;
  const auto always = [](auto StepRecord::* field) {
    return [field](const StepRecord& record) { return std::optional<double>(record.*field); };
  };
  return loss_plot(runs, "Loss", 0, true) + difference_plot(runs) +
         loss_plot(runs, "Loss, where it is compared", comparison.first_step, false) +
         overlay(runs, norm, true, always(&StepRecord::grad_norm)) +
         overlay(runs, scale, false, [](const StepRecord& record) { return record.loss_scale; }) +
         overlay(runs, speed, true, always(&StepRecord::items_per_second)) +
         overlay(runs, rate, false, always(&StepRecord::lr));
}

std::string comparison_table(const RunComparison& comparison) {
  std::vector<std::vector<Cell>> rows;
  const auto number = [](const std::optional<double>& value) {
    return Cell{.html = value ? digits(*value, 5) : "–", .number = true};
  };
  for (size_t i = 0; i < comparison.rows.size(); ++i) {
    const RunComparison::Row& row = comparison.rows[i];
    const std::string evaluated =
        row.evaluation_loss && row.evaluation_step != comparison.last_step
            ? " <span class=\"quiet\">(step " + with_commas(row.evaluation_step) + ")</span>"
            : "";
    rows.push_back(
        {{.html = "<span class=\"nowrap\"><span class=\"swatch c" + std::to_string(colour_of(i)) +
                  "\"></span>" + escaped(row.name) + "</span>"},
         {.html = number(row.final_loss).html +
                  (row.not_finite > 0
                       ? " <span class=\"quiet\">(" + with_commas(row.not_finite) + " NaN or Inf)</span>"
                       : ""),
          .number = true},
         {.html = i == 0 ? "–" : difference_text(row.from_first), .number = true},
         {.html = i == 0 ? "reference" : std::string(to_string(row.from_first.likeness))},
         {.html = number(row.evaluation_loss).html + evaluated, .number = true},
         {.html = row.summary.items_per_second ? with_suffix(*row.summary.items_per_second) : "–",
          .number = true},
         {.html = row.summary.peak_bytes > 0 ? bytes_text(static_cast<double>(row.summary.peak_bytes)) : "–",
          .number = true},
         {.html = with_commas(row.summary.skipped), .number = true},
         {.html = with_commas(row.summary.last_step), .number = true}});
  }
  return table({"run", "training loss", "difference, 95%", "", "held-out loss", "per second", "peak memory",
                "skipped", "steps"},
               rows);
}

using Keys = std::vector<std::pair<std::string, std::string>>;

/// The keys of a configuration as to_toml writes it: a section in brackets, a key a line.
Keys keys_of(const std::string& configuration) {
  Keys keys;
  std::string section;
  for (size_t begin = 0; begin < configuration.size();) {
    const size_t end = std::min(configuration.find('\n', begin), configuration.size());
    const std::string line = configuration.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = line.find(" = ");
    if (line.starts_with('[') && line.ends_with(']'))
      section = line.substr(1, line.size() - 2) + ".";
    else if (equals != std::string::npos)
      keys.emplace_back(section + line.substr(0, equals), line.substr(equals + 3));
  }
  return keys;
}

std::string configuration_differences(Runs runs) {
  std::vector<std::string> order;
  std::set<std::string> seen;
  std::vector<std::map<std::string, std::string>> all;
  for (const RunHistory& run : runs) {
    all.emplace_back();
    for (const auto& [key, value] : keys_of(run.sittings.back().header.configuration)) {
      if (seen.insert(key).second) order.push_back(key);
      all.back()[key] = value;
    }
  }
  std::vector<std::vector<Cell>> rows;
  int64_t left_out = 0;
  for (const std::string& key : order) {
    const auto value_in = [&](const auto& keys) { return keys.contains(key) ? keys.at(key) : std::string(); };
    if (std::ranges::all_of(all, [&](const auto& keys) { return value_in(keys) == value_in(all.front()); }))
      continue;
    if (rows.size() == kMostKeys) {
      ++left_out;
      continue;
    }
    rows.push_back({{.html = "<code>" + bounded(key, 200) + "</code>"}});
    for (const auto& keys : all)
      rows.back().push_back({.html = "<code>" + bounded(value_in(keys), 2000) + "</code>"});
  }
  std::vector<std::string> headings = {"key"};
  for (const RunHistory& run : runs) headings.push_back(escaped(run.name));
  return "<section><h2>Differences between their configurations</h2>" +
         (rows.empty() ? "<p>Nothing.</p>" : table(headings, rows)) +
         (left_out == 0 ? "" : "<p class=\"note\">And in " + with_commas(left_out) + " keys more.</p>") +
         "</section>\n";
}

}  // namespace

std::string compare_html(Runs runs) {
  HALFSTEP_CHECK(runs.size() <= kMostRuns, "compare: ", runs.size(), " runs in one page; at most ", kMostRuns,
                 " can be told apart. Compare fewer, or leave --html out.");
  const RunComparison comparison = compare_runs(runs);
  std::string names;
  for (const RunHistory& run : runs) names += (names.empty() ? "" : " · ") + run.name;
  const std::string body =
      "<main>\n<header><div class=\"headline\"><h1>" + escaped(names) + "</h1></div>\n<p class=\"verdict\">" +
      escaped(comparison.sentence) + "</p></header>\n<section class=\"compared\">" +
      comparison_table(comparison) + "<p class=\"note\">Training loss: mean over steps " +
      with_commas(comparison.first_step) + " to " + with_commas(comparison.last_step) +
      ". The difference is that of the training loss from the first run's, of its "
      "loss, with its 95% interval; runs are the same if the whole interval is within " +
      percent(RunComparison::kMargin) +
      ", different if all of it is beyond.</p></section>\n<section><div class=\"plots comparing\">" +
      plots(runs, comparison) + "</div></section>\n" + configuration_differences(runs) +
      "<footer>Made by Halfstep " HALFSTEP_VERSION " from the runs' log.jsonl.</footer>\n</main>\n";
  return page(names + " – Halfstep", body);
}

}  // namespace halfstep
