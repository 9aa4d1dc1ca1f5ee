// Whether two runs saw the same batches.
#pragma once

#include <string>

#include "report/run_report.h"

namespace halfstep::report {

/// Empty if each step of both had the same tokens, by what their configurations say; otherwise one sentence
/// that tells why not.
std::string why_not_the_same_batches(const RunHistory& a, const RunHistory& b);

/// "fp32 and bf16 are the same within noise: ... fp16 differs from fp32: ...".
std::string comparison_sentence(const RunComparison& comparison);

/// Of the difference: "+2.01 ± 0.05%", or why there is none.
std::string difference_text(const LossDifference& difference);

}  // namespace halfstep::report
