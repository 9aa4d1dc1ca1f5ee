// Pieces that the plots of one run are made of.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "report/figures.h"
#include "report/plot.h"
#include "report/run_report.h"

namespace halfstep::report {

/// Below so many steps a smoothed curve would tell less than the steps themselves.
inline constexpr int64_t kFewSteps = 60;

/// Of a run's smoothed curves: a fiftieth of its steps.
int64_t smoothing_window(const RunHistory& run);

/// From the first logged step to the last.
std::pair<int64_t, int64_t> step_range(const RunHistory& run);

/// A plot over all steps of the run, with a line where it was resumed.
Plot plot_of(const RunHistory& run, const std::string& title);

/// What its loss is measured in.
std::string loss_unit(const RunHistory& run);
// These two have none, and say so.
inline constexpr const char *kLearningRateUnit = "factor on the update",
                            *kLossScaleUnit = "factor on the loss";

std::vector<Point> points_of_field(const RunHistory& run, double StepRecord::* field);
std::vector<Point> points_of_field(const RunHistory& run, std::optional<double> StepRecord::* field);

/// One curve; if it jumps from step to step and there are many, faint behind its smoothed self. Empty if
/// there is no point.
std::string single_plot(const RunHistory& run, Plot plot, int colour, bool jumps, std::vector<Point> points);

/// Of a share, in percent.
std::string share_plot(const RunHistory& run, const std::string& title, int colour,
                       std::optional<double> StepRecord::* share);

std::string training_plots(const RunHistory& run);  ///< loss, rate, gradients, loss scale, stalled share
std::string speed_plots(const RunHistory& run);     ///< tokens a second, share of the peak, time by phase
std::string memory_plots(const RunHistory& run);    ///< empty if it was not measured

}  // namespace halfstep::report
