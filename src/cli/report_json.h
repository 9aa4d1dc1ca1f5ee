// What `report` and `compare` answer to programs, and a stranger's words on a terminal.
#pragma once

#include <halfstep/report.h>

#include <nlohmann/json.hpp>
#include <string>

namespace halfstep::cli {

/// What is not known is null; what is not finite, a word as in log.jsonl.
nlohmann::ordered_json json_of(const RunSummary& summary);
nlohmann::ordered_json json_of(const RunComparison& comparison);

/// Control characters, which could move the cursor or worse, become spaces.
std::string fit_for_terminal(std::string text);

}  // namespace halfstep::cli
