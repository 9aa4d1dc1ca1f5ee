#include "report/run_curves.h"

#include <algorithm>
#include <span>

namespace halfstep::report {

int64_t smoothing_window(const RunHistory& run) { return std::ssize(run.steps) / 50 | 1; }

std::pair<int64_t, int64_t> step_range(const RunHistory& run) {
  if (run.steps.empty()) return {0, 0};
  int64_t first = run.steps.front().step, last = run.steps.back().step;
  for (const EvaluationRecord& record : run.evaluations) {
    first = std::min(first, record.step);
    last = std::max(last, record.step);
  }
  return {first, last};
}

Plot plot_of(const RunHistory& run, const std::string& title) {
  const auto [first, last] = step_range(run);
  Plot plot{.title = title, .first_step = first, .last_step = last};
  const double steps_per_column = static_cast<double>(std::max<int64_t>(1, last - first)) / kMostColumns;
  for (const auto& sitting : std::span(run.sittings).subspan(1)) {
    const int64_t step = std::clamp(sitting.after_step, first, last);
    const bool in_next_column = plot.resumed_after.empty() ||
                                static_cast<double>(step - plot.resumed_after.back()) >= steps_per_column;
    if (in_next_column) plot.resumed_after.push_back(step);
  }
  return plot;
}

std::vector<Point> points_of_field(const RunHistory& run, double StepRecord::* field) {
  return points_of(run, [field](const StepRecord& record) { return std::optional(record.*field); });
}

std::vector<Point> points_of_field(const RunHistory& run, std::optional<double> StepRecord::* field) {
  return points_of(run, [field](const StepRecord& record) { return record.*field; });
}

std::string single_plot(const RunHistory& run, Plot plot, int colour, bool jumps, std::vector<Point> points) {
  if (points.empty()) return "";
  const bool smooth = jumps && std::ssize(points) >= kFewSteps;
  Series over = smooth ? smooth_series("smoothed", colour, points, smoothing_window(run)) : Series{};
  over.not_finite.clear();  // told by the steps themselves
  over.in_legend = false;
  plot.series.push_back(
      {.colour = colour, .drawn = smooth ? Drawn::Faint : Drawn::Line, .points = std::move(points)});
  if (smooth) plot.series.push_back(std::move(over));
  return plot_html(plot);
}

std::string share_plot(const RunHistory& run, const std::string& title, int colour,
                       std::optional<double> StepRecord::* share) {
  Plot plot = plot_of(run, title);
  plot.unit = "%";
  plot.from_zero = true;
  std::vector<Point> points = points_of_field(run, share);
  for (Point& point : points) point.value *= 100;
  return single_plot(run, plot, colour, true, std::move(points));
}

}  // namespace halfstep::report
