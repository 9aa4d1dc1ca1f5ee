#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "report/figures.h"
#include "report/run_report.h"
#include "words/names.h"
#include "words/numbers.h"

namespace halfstep {
namespace report {

int64_t final_window(int64_t steps) {
  return std::min<int64_t>(steps, std::clamp<int64_t>(steps / 10, 10, 1000));
}

std::vector<Point> evaluation_points(const RunHistory& run) {
  std::vector<Point> points;
  for (const EvaluationRecord& record : run.evaluations)
    points.push_back({.step = record.step, .value = record.loss});
  for (const StepRecord& record : run.steps) {
    if (!record.evaluation_loss) continue;
    if (!std::ranges::binary_search(run.evaluations, record.step, {}, &EvaluationRecord::step))
      points.push_back({.step = record.step, .value = *record.evaluation_loss});
  }
  std::ranges::sort(points, {}, &Point::step);
  return points;
}

std::optional<double> finite_mean(std::span<const Point> points) {
  double sum = 0.0;
  int64_t count = 0;
  for (const Point& point : points) {
    if (!std::isfinite(point.value)) continue;
    sum += point.value;
    ++count;
  }
  if (count == 0) return {};
  return sum / static_cast<double>(count);
}

std::optional<RunConfig> configuration_of(const RunHistory& run) {
  try {
    return resolve_config(
               {.file = ConfigText{.name = "log", .text = run.sittings.back().header.configuration}})
        .config;
  } catch (const Error&) {  // of another version: the page shows it as it is
    return {};
  }
}

}  // namespace report

namespace {

// An error's message, and some lists of tensors within one.
constexpr size_t kMostReasonBytes = 4000;

using report::Point;

std::optional<double> median(std::vector<Point> points) {
  std::erase_if(points, [](const Point& point) { return !std::isfinite(point.value); });
  if (points.empty()) return {};
  const auto middle = points.begin() + std::ssize(points) / 2;
  std::ranges::nth_element(points, middle, {}, &Point::value);
  return middle->value;
}

std::string trained_of(const RunConfig& config) {
  const auto& model = config.model;
  std::string text = model.from ? *model.from : model.kind.value_or("a model");
  if (model.layers && model.width)
    text += ", " + counted(*model.layers, "block") + " of width " + with_commas(*model.width);
  return text + ", " + config.precision.compute;
}

std::span<const Point> last_of(const std::vector<Point>& points, int64_t count) {
  return std::span(points).last(static_cast<size_t>(std::min<int64_t>(count, std::ssize(points))));
}

std::string how_it_ended(const RunHistory& run, const RunSummary& summary) {
  const std::string of_planned =
      summary.planned_steps > summary.last_step ? " of " + with_commas(summary.planned_steps) : std::string();
  const std::string steps =
      with_commas(summary.last_step) + of_planned + " steps in " + duration(summary.seconds);
  if (!run.end())
    return "After " + steps + " the log has no end record: the run was killed, or is still running. ";
  const std::string_view reason = beginning_of(run.end()->why, kMostReasonBytes);
  const std::string cut = reason.size() < run.end()->why.size() ? "…" : "";
  const std::string why = reason.empty() ? "." : ": " + std::string(reason) + cut;
  const std::string stop = why.ends_with('.') ? " " : ". ";
  if (run.end()->outcome == "done") return "Done: " + steps + ". ";
  if (run.end()->outcome == "interrupted") return "Interrupted after " + steps + why + stop;
  if (run.end()->outcome == "out of time") return "Out of time after " + steps + why + stop;
  if (run.end()->outcome == "diverged") return "Diverged after " + steps + why + stop;
  return "Ended (" + run.end()->outcome + ") after " + steps + why + stop;
}

std::string loss_sentence(const RunHistory& run, const RunSummary& summary) {
  if (run.steps.empty()) return "No step was logged. ";
  if (!summary.final_loss)
    return "Loss went from " + digits(*summary.first_loss) + " to a number that is not finite. ";
  const bool fell = *summary.final_loss < *summary.first_loss;
  std::string text = std::string("Loss ") + (fell ? "fell" : "went") + " from " +
                     digits(*summary.first_loss) + " to " + digits(*summary.final_loss) +
                     ", the mean of the last " + counted(summary.final_steps, "step");
  if (summary.first_evaluation_loss)
    text += "; on held-out data from " + digits(*summary.first_evaluation_loss) + " to " +
            digits(*summary.evaluation_loss);
  else if (summary.evaluation_loss)
    text += "; on held-out data it is " + digits(*summary.evaluation_loss);
  if (summary.accuracy) text += ", with " + percent(*summary.accuracy) + " right";
  text += ". ";
  if (summary.not_finite > 0) text += "It was not finite in " + counted(summary.not_finite, "step") + ". ";
  return text;
}

std::string verdict_of(const RunHistory& run, const RunSummary& summary) {
  std::string text = how_it_ended(run, summary) + loss_sentence(run, summary);
  if (summary.items_per_second) {
    text += with_suffix(*summary.items_per_second) + " " + run.sittings.back().header.unit + "/s";
    if (summary.share_of_peak) text += ", " + percent(*summary.share_of_peak) + " of the machine's peak";
    text += ". ";
  }
  text += summary.skipped == 0
              ? "No step was skipped."
              : (summary.skipped == 1 ? "1 step was skipped."
                                      : with_commas(summary.skipped) + " steps were skipped.");
  if (summary.stalled_share)
    text += " " + percent(*summary.stalled_share) + " of the last updates were too small to move a weight.";
  return text;
}

}  // namespace

std::vector<Finding> findings_of(const RunHistory& run) {
  int64_t ranks = run.sittings.back().header.ranks;
  // At least: logs of earlier versions do not count them.
  for (const CulpritRecord& each : run.culprits) ranks = std::max(ranks, each.rank + 1);
  const auto config = report::configuration_of(run);
  FindingWatch watch(config ? run_setup(*config, ranks) : RunSetup{.ranks = ranks});
  auto probe = run.probes.begin();
  auto culprit = run.culprits.begin();
  auto made = run.findings.begin();
  // Of one step, what was seen inside it first.
  const auto up_to = [&](int64_t step) {
    for (; probe != run.probes.end() && probe->step <= step; ++probe)
      (void)watch.take(ProbeRecord{.step = probe->step,
                                   .seconds = probe->seconds,
                                   .role = probe->role,
                                   .name = probe->name,
                                   .stats = probe->stats(),
                                   .summed_parts = probe->summed_parts,
                                   .sum_type = probe->sum_type});
    for (; culprit != run.culprits.end() && culprit->step <= step; ++culprit) (void)watch.take(*culprit);
  };
  for (const StepRecord& step : run.steps) {
    up_to(step.step);
    (void)watch.take(step);
    for (; made != run.findings.end() && made->step <= step.step; ++made) (void)watch.take(*made);
  }
  up_to(std::numeric_limits<int64_t>::max());
  for (; made != run.findings.end(); ++made) (void)watch.take(*made);
  return watch.findings();
}

RunSummary summarize(const RunHistory& run) {
  const auto loss = report::points_of(run, [](const StepRecord& r) { return std::optional(r.loss); });
  const int64_t window = report::final_window(std::ssize(loss));
  RunSummary summary;
  summary.final_steps = window;
  if (const auto config = report::configuration_of(run)) {
    summary.trained = trained_of(*config);
    summary.planned_steps = config->train.steps;
  }
  if (!loss.empty()) {
    summary.last_step = loss.back().step;
    summary.seconds = run.steps.back().seconds;
    summary.first_loss = loss.front().value;
    summary.final_loss = report::finite_mean(last_of(loss, window));
  }
  if (run.end()) {
    summary.last_step = std::max(summary.last_step, run.end()->step);
    summary.seconds = run.end()->seconds;
  }
  for (const StepRecord& record : run.steps) {
    // No sum of a log that lies runs over.
    summary.items = std::min(summary.items + record.items, report::kMostInteger);
    summary.skipped += record.skipped ? 1 : 0;
    summary.not_finite += std::isfinite(record.loss) ? 0 : 1;
    if (record.memory) summary.peak_bytes = std::max(summary.peak_bytes, record.memory->peak_bytes);
  }
  if (const auto points = report::evaluation_points(run); !points.empty()) {
    summary.evaluation_loss = points.back().value;
    if (points.size() > 1) summary.first_evaluation_loss = points.front().value;
  }
  if (!run.evaluations.empty()) summary.accuracy = run.evaluations.back().accuracy;
  summary.items_per_second =
      median(report::points_of(run, [](const StepRecord& r) { return std::optional(r.items_per_second); }));
  summary.share_of_peak = median(report::points_of(run, [](const StepRecord& r) { return r.share_of_peak; }));
  const auto stalled = report::points_of(run, [](const StepRecord& r) { return r.stalled_share; });
  summary.stalled_share = report::finite_mean(last_of(stalled, window));
  summary.verdict = verdict_of(run, summary);
  return summary;
}

}  // namespace halfstep
