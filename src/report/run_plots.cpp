#include "report/run_plots.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <span>

#include "report/html.h"
#include "words/numbers.h"

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

std::string loss_unit(const RunHistory& run) {
  const auto config = configuration_of(run);
  const bool is_own_model = config && (config->model.kind || config->model.from);
  return is_own_model ? "cross-entropy, nats" : "of a batch, in the task's unit";
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
  whole.unit = loss_unit(run);
  whole.wide = true;
  if (std::ssize(run.steps) < 2 * kFewSteps) return loss_plot(run, whole);
  Plot end = plot_of(run, "Loss, second half");
  end.unit = whole.unit;
  end.first_step = run.steps[run.steps.size() / 2].step;
  std::erase_if(end.resumed_after, [&](int64_t step) { return step < end.first_step; });
  return loss_plot(run, whole) + loss_plot(run, end);
}

std::string loss_scale_plot(const RunHistory& run) {
  Plot plot = plot_of(run, "Loss scale");
  plot.unit = kLossScaleUnit;
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
  norm.unit = "L2, before clipping";
  Plot rate = plot_of(run, "Learning rate");
  rate.unit = kLearningRateUnit;
  rate.from_zero = true;
  return loss_plots(run) + single_plot(run, rate, 3, false, points_of_field(run, &StepRecord::lr)) +
         single_plot(run, norm, 1, true, points_of_field(run, &StepRecord::grad_norm)) +
         loss_scale_plot(run) +
         share_plot(run, "Updates too small to move a weight", 2, &StepRecord::stalled_share);
}

namespace {

constexpr size_t kMostClasses = 100;

struct Phase {
  const char* name;
  double PhaseSeconds::* seconds;
  int colour;
};
// In the order of a step.
constexpr std::array<Phase, 6> kPhases{{{"data", &PhaseSeconds::data, 5},
                                        {"forward", &PhaseSeconds::forward, 1},
                                        {"backward", &PhaseSeconds::backward, 2},
                                        {"inspect", &PhaseSeconds::inspect, 3},
                                        {"step", &PhaseSeconds::step, 4},
                                        {"other", &PhaseSeconds::other, 7}}};

std::vector<Point> phase_points(const RunHistory& run, const Phase& phase) {
  return points_of(run,
                   [&](const StepRecord& record) { return std::optional(record.phases.*phase.seconds); });
}

double whole_step(const StepRecord& record) {
  double seconds = 0.0;
  for (const Phase& phase : kPhases) seconds += record.phases.*phase.seconds;
  return seconds;
}

/// Milliseconds unless the steps take seconds.
std::pair<std::string, double> time_unit(double seconds) {
  return seconds < 2 ? std::pair<std::string, double>{"ms", 1e3} : std::pair<std::string, double>{"s", 1.0};
}

std::string phase_plot(const RunHistory& run) {
  Plot plot = plot_of(run, "Time of a step");
  plot.from_zero = true;
  const auto steps =
      points_of(run, [](const StepRecord& record) { return std::optional(whole_step(record)); });
  const auto [unit, factor] = time_unit(finite_mean(steps).value_or(0.0));
  plot.unit = unit;
  for (const Phase& phase : kPhases) {
    auto points = phase_points(run, phase);
    for (Point& point : points) point.value *= factor;
    plot.series.push_back(
        {.name = phase.name, .colour = phase.colour, .drawn = Drawn::Area, .points = std::move(points)});
  }
  const auto longest = std::ranges::max_element(steps, {}, &Point::value);
  plot.caption = "Longest step: " + with_commas(longest->step) + ", " + duration(longest->value) + ".";
  if (std::ssize(steps) > kMostAreaColumns) plot.caption += " The areas are means of neighbouring steps.";
  return plot_html(plot);
}

std::string bar(double share, int colour) {
  return "<span class=\"bar c" + std::to_string(colour) + "\" style=\"width:" + json_number(100 * share) +
         "%\"></span>";
}

std::string phase_table(const RunHistory& run) {
  std::vector<std::vector<Cell>> rows;
  double whole = 0.0;
  double longest = 0.0;
  for (const Phase& phase : kPhases) {
    const double mean = finite_mean(phase_points(run, phase)).value_or(0.0);
    whole += mean;
    longest = std::max(longest, mean);
  }
  for (const Phase& phase : kPhases) {
    const double mean = finite_mean(phase_points(run, phase)).value_or(0.0);
    const double share = whole > 0 ? mean / whole : 0.0;
    rows.push_back({{.html = phase.name},
                    {.html = bar(longest > 0 ? mean / longest : 0.0, phase.colour)},
                    {.html = duration(mean), .number = true},
                    {.html = percent(share), .number = true}});
  }
  rows.push_back({{.html = "<b>step</b>"},
                  {.html = ""},
                  {.html = "<b>" + duration(whole) + "</b>", .number = true},
                  {.html = "", .number = true}});
  return "<div class=\"panel bars\"><h3>Time by phase <span class=\"unit\">mean of a step</span></h3>" +
         table({"", "", "time", "share"}, rows) + "</div>\n";
}

std::string memory_table(const RunHistory& run) {
  struct Class {
    std::string name;
    int64_t peak = 0, live = 0;
  };
  std::map<std::string, Class> by_name;
  int64_t peak = 0, live = 0;
  for (const StepRecord& record : run.steps) {
    if (!record.memory) continue;
    peak = std::max(peak, record.memory->peak_bytes);
    live = record.memory->live_bytes;
    for (const MemoryRecord::Class& one : record.memory->classes) {
      Class& known = by_name.try_emplace(one.name, Class{.name = one.name}).first->second;
      known.peak = std::max(known.peak, one.peak_bytes);
      known.live = one.live_bytes;
    }
  }
  std::vector<Class> classes;
  for (auto& [name, one] : by_name) classes.push_back(std::move(one));
  std::ranges::sort(classes, [](const Class& a, const Class& b) {
    return a.peak != b.peak ? a.peak > b.peak : a.name < b.name;
  });
  const auto all_classes = std::ssize(classes);
  classes.resize(std::min(classes.size(), kMostClasses));
  const double greatest = classes.empty() ? 1.0 : std::max(1.0, static_cast<double>(classes.front().peak));
  const auto cell = [](int64_t bytes) {
    return Cell{.html = bytes_text(static_cast<double>(bytes)), .number = true};
  };
  std::vector<std::vector<Cell>> rows;
  for (const Class& one : classes)
    rows.push_back({{.html = bounded(one.name, 200)},
                    {.html = bar(static_cast<double>(one.peak) / greatest, 1)},
                    cell(one.peak),
                    cell(one.live)});
  if (all_classes > std::ssize(classes))
    rows.push_back({{.html = with_commas(all_classes - std::ssize(classes)) + " more"}, {}, {}, {}});
  rows.push_back({{.html = "<b>all</b>"}, {.html = ""}, cell(peak), cell(live)});
  return "<div class=\"panel bars\"><h3>Memory by class</h3>" + table({"", "", "peak", "at the end"}, rows) +
         "<p class=\"note\">Classes have their peaks at different times, so these add up to more than the "
         "peak of all.</p>"
         "</div>\n";
}

}  // namespace

std::string speed_plots(const RunHistory& run) {
  if (run.steps.empty()) return "";
  Plot speed = plot_of(run, "Speed");
  speed.unit = run.sittings.back().header.unit + "/s";
  speed.from_zero = true;
  return single_plot(run, speed, 3, true, points_of_field(run, &StepRecord::items_per_second)) +
         share_plot(run, "Share of the machine's peak", 4, &StepRecord::share_of_peak) + phase_plot(run) +
         phase_table(run);
}

std::string memory_plots(const RunHistory& run) {
  constexpr double kMega = 1e6, kGiga = 1e9;
  const int64_t most = summarize(run).peak_bytes;
  const double unit = most < 2 * kGiga ? kMega : kGiga;
  Plot plot = plot_of(run, "Memory of tensors");
  plot.unit = unit == kMega ? "MB" : "GB";
  plot.from_zero = true;
  const auto bytes = [&](int64_t MemoryRecord::* field) {
    return points_of(run, [field, unit](const StepRecord& record) -> std::optional<double> {
      if (!record.memory) return {};
      return static_cast<double>((*record.memory).*field) / unit;
    });
  };
  auto peak = bytes(&MemoryRecord::peak_bytes);
  if (peak.empty()) return "";
  plot.series = {{.name = "peak within the step", .colour = 1, .points = std::move(peak)},
                 {.name = "after the step", .colour = 3, .points = bytes(&MemoryRecord::live_bytes)}};
  return plot_html(plot) + memory_table(run);
}

}  // namespace halfstep::report
