// Figures that the report and the comparison share.
#pragma once

#include <halfstep/run_config.h>

#include <optional>
#include <span>
#include <vector>

#include "report/run_report.h"
#include "report/thin.h"

namespace halfstep::report {

/// The largest whole number of a log: a double, as which many readers of JSON take it, holds all up to here.
inline constexpr int64_t kMostInteger = int64_t{1} << 53;

/// Steps at the end of a run over which its final loss is the mean: a tenth of them, at least 10 and at most
/// 1,000, or all.
int64_t final_window(int64_t steps);

/// One value of every logged step; steps without it are left out.
std::vector<Point> points_of(const RunHistory& run, auto value) {
  std::vector<Point> points;
  points.reserve(run.steps.size());
  for (const StepRecord& record : run.steps)
    if (const std::optional<double> found = value(record))
      points.push_back({.step = record.step, .value = *found});
  return points;
}

/// Of the evaluations, and of steps that tell one without a record of its own.
std::vector<Point> evaluation_points(const RunHistory& run);

/// The mean of the finite ones, none if there is none.
std::optional<double> finite_mean(std::span<const Point> points);

/// The configuration of the last sitting; none if this version cannot read it.
std::optional<RunConfig> configuration_of(const RunHistory& run);

}  // namespace halfstep::report
