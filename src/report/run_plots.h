// The plots of one run.
#pragma once

#include <halfstep/report.h>

#include <string>

namespace halfstep::report {

std::string training_plots(const RunHistory& run);  ///< loss, rate, gradients, loss scale, stalled share
std::string speed_plots(const RunHistory& run);     ///< tokens a second, share of the peak, time by phase
std::string memory_plots(const RunHistory& run);    ///< empty if it was not measured

/// Steps after which the run was taken up again.
std::vector<int64_t> resumed_after(const RunHistory& run);

/// From the first logged step to the last.
std::pair<int64_t, int64_t> step_range(const RunHistory& run);

}  // namespace halfstep::report
