// The line that tells how a run is doing.
#pragma once

#include <halfstep/run_watch.h>

#include <optional>
#include <string>
#include <vector>

namespace halfstep::cli {

struct StatusField {
  std::string before{}, value{}, after{};  ///< "lr ", "3.00e-4", ""
  int rank = 0;                            ///< where there is no room, the highest goes first
  bool alarm = false;                      ///< something a person should see

  size_t columns() const { return before.size() + value.size() + after.size(); }
};

/// In the order in which they are shown. ASCII only, so that bytes are columns.
std::vector<StatusField> status_fields(const RunPlan& plan, const StepRecord& record, int64_t skipped_steps,
                                       std::optional<double> seconds_left);

/// What of it fits into so many columns, with two spaces between fields.
std::string status_line(std::vector<StatusField> fields, size_t columns, bool colour);

}  // namespace halfstep::cli
