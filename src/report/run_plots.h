// The plots of one run.
#pragma once

#include "report/report.h"

#include <string>

namespace halfstep::report {

std::string training_plots(const RunHistory& run);  ///< loss, rate, gradients, loss scale, stalled share
std::string speed_plots(const RunHistory& run);     ///< tokens a second, share of the peak, time by phase
std::string memory_plots(const RunHistory& run);    ///< empty if it was not measured

}  // namespace halfstep::report
