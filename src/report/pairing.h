// Whether two runs saw the same batches.
#pragma once

#include "report/report.h"

#include <string>

namespace halfstep::report {

/// Empty if each step of both had the same tokens, by what their configurations say; otherwise one sentence
/// that tells why not.
std::string why_not_the_same_batches(const RunHistory& a, const RunHistory& b);

}  // namespace halfstep::report
