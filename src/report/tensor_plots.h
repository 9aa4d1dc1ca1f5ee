// What a page shows of the numbers in a run's tensors.
#pragma once

#include <string>

#include "report/run_report.h"

namespace halfstep::report {

/// The most serious first; empty if there are none above a note.
std::string findings_section(const RunHistory& run);

/// For each role, magnitudes of the last step that was looked at, all together and layer by layer, under the
/// windows of the formats; and how the shares that a format loses moved over the run. Empty without probes.
std::string tensor_section(const RunHistory& run);

}  // namespace halfstep::report
