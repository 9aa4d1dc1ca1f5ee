// Where the log of a run that is resumed has to end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace halfstep::log {

struct LogEnd {
  uint64_t bytes = 0;         ///< to be kept
  int64_t latest_step = 0;    ///< of a record that is kept
  std::string step_record{};  ///< the last one of a step; empty if there is none
};

/// All records up to `step`, without a last line that was cut or lines at the end that are no records. An
/// Error if the file is not a log of ours.
LogEnd end_of_jsonl(const std::filesystem::path& path, int64_t step);
LogEnd end_of_csv(const std::filesystem::path& path, int64_t step);

}  // namespace halfstep::log
