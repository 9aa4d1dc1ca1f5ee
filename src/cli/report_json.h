// What `report` and `compare` answer to programs.
#pragma once

#include "report/report.h"

#include <nlohmann/json.hpp>

namespace halfstep::cli {

/// What is not known is null; what is not finite, a word as in log.jsonl.
nlohmann::ordered_json json_of(const RunSummary& summary);
nlohmann::ordered_json json_of(const RunComparison& comparison);

}  // namespace halfstep::cli
