#include "report/run_plots.h"

#include <algorithm>
#include <cmath>

#include "words/numbers.h"
#include "report/run_curves.h"

namespace halfstep::report {
namespace {

/// One loss of 1e6 would leave a flat line of all the others.
bool wants_log_axis(const std::vector<Point>& points) {
  std::vector<double> values;
  for (const Point& point : points) {
    if (point.value <= 0) return false;
    if (std::isfinite(point.value)) values.push_back(point.value);
  }
  if (values.empty()) return false;
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return std::ranges::max(values) > 20 * *middle;
}

std::vector<Point> from_step(std::vector<Point> points, int64_t step) {
  std::erase_if(points, [&](const Point& point) { return point.step < step; });
  return points;
}

/// From a step on: the beginning of a run is so much higher than the rest that it hides what comes later.
std::string loss_plot(const RunHistory& run, Plot plot) {
  const std::vector<Point> all = points_of_field(run, &StepRecord::loss);
  std::vector<Point> loss = from_step(all, plot.first_step);
  if (wants_log_axis(loss)) plot.kind = AxisKind::Log10;
  const int64_t window = smoothing_window(run);
  if (std::ssize(loss) < kFewSteps) {
    plot.series.push_back({.name = "training", .points = std::move(loss)});
  } else {
    Series smooth = smooth_series("smoothed over " + counted(window, "step"), 1, all, window);
    smooth.points = from_step(std::move(smooth.points), plot.first_step);
    smooth.not_finite.clear();  // told by the curve of the steps
    plot.series.push_back({.name = "training", .drawn = Drawn::Faint, .points = std::move(loss)});
    plot.series.push_back(std::move(smooth));
  }
  if (auto held_out = from_step(evaluation_points(run), plot.first_step); !held_out.empty())
    plot.series.push_back(
        {.name = "held out", .colour = 2, .drawn = Drawn::Dots, .points = std::move(held_out)});
  return plot_html(plot);
}

std::string loss_plots(const RunHistory& run) {
  Plot whole = plot_of(run, "Loss");
  whole.wide = true;
  if (std::ssize(run.steps) < 2 * kFewSteps) return loss_plot(run, whole);
  Plot end = plot_of(run, "Loss, second half");
  end.first_step = run.steps[run.steps.size() / 2].step;
  std::erase_if(end.resumed_after, [&](int64_t step) { return step < end.first_step; });
  return loss_plot(run, whole) + loss_plot(run, end);
}

std::string loss_scale_plot(const RunHistory& run) {
  Plot plot = plot_of(run, "Loss scale");
  plot.kind = AxisKind::Log2;
  plot.marks.name = "skipped";
  for (const StepRecord& record : run.steps)
    if (record.skipped) plot.marks.steps.push_back(record.step);
  return single_plot(run, plot, 4, false, points_of_field(run, &StepRecord::loss_scale));
}

}  // namespace

std::string training_plots(const RunHistory& run) {
  if (run.steps.empty()) return "<p class=\"none\">No step was logged.</p>";
  Plot norm = plot_of(run, "Gradient norm");
  norm.kind = AxisKind::Log10;
  norm.unit = "before clipping";
  Plot rate = plot_of(run, "Learning rate");
  rate.from_zero = true;
  return loss_plots(run) + single_plot(run, rate, 3, false, points_of_field(run, &StepRecord::lr)) +
         single_plot(run, norm, 1, true, points_of_field(run, &StepRecord::grad_norm)) +
         loss_scale_plot(run) +
         share_plot(run, "Updates too small to move a weight", 2, &StepRecord::stalled_share);
}

}  // namespace halfstep::report
