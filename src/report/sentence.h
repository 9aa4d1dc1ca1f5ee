// A comparison in words.
#pragma once

#include "report/report.h"

#include <string>

namespace halfstep::report {

/// "fp32 and bf16 are the same within noise: ... fp16 differs from fp32: ...".
std::string comparison_sentence(const RunComparison& comparison);

/// Of the difference: "+2.01 ± 0.05%", or why there is none.
std::string difference_text(const LossDifference& difference);

}  // namespace halfstep::report
