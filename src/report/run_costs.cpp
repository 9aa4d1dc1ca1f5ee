// What a run took: time and memory.
#include <algorithm>
#include <array>
#include <map>

#include "report/html.h"
#include "words/numbers.h"
#include "report/run_curves.h"
#include "report/run_plots.h"

namespace halfstep::report {
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
  return single_plot(run, speed, 3, true, points_of_field(run, &StepRecord::tokens_per_second)) +
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
