// The records of a log as lines.
#pragma once

#include <halfstep/run_log.h>

#include <string>
#include <string_view>

#include "log/log_text.h"

namespace halfstep::log {

/// The first row of log.csv, with its end of line.
extern const std::string_view kCsvColumns;

// Each returns the line with its end, until the next call with the same buffer.
std::string_view run_line(JsonLine& line, const RunHeader& header, int64_t after_step);
std::string_view step_line(JsonLine& line, const StepRecord& record);
std::string_view step_row(std::string& row, const StepRecord& record);
std::string_view evaluation_line(JsonLine& line, const EvaluationRecord& record);
std::string_view sample_line(JsonLine& line, const SampleRecord& record);
std::string_view note_line(JsonLine& line, int64_t step, double seconds, std::string_view text);
std::string_view checkpoint_line(JsonLine& line, const CheckpointRecord& record);
std::string_view end_line(JsonLine& line, int64_t step, double seconds, std::string_view outcome,
                          std::string_view why);

}  // namespace halfstep::log
