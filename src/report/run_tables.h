// What a run's report tells in words: skipped steps, evaluations, samples, notes, configuration, machine.
#pragma once

#include "report/report.h"

#include <string>

namespace halfstep::report {

// Each is a section with its heading, or empty if the run has nothing of the kind.
std::string skipped_section(const RunHistory& run);
std::string evaluation_section(const RunHistory& run);
std::string sample_section(const RunHistory& run);
std::string note_section(const RunHistory& run);
std::string sitting_section(const RunHistory& run);
std::string configuration_section(const RunHistory& run);
std::string machine_section(const RunHistory& run);

}  // namespace halfstep::report
