// Records as they stand in log.jsonl and log.csv. They are written thousands of times: everything is appended
// to a buffer that is used again, with std::to_chars.
#pragma once

#include <halfstep/run_log.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace halfstep::log {

void append_integer(std::string& out, int64_t value);

/// The shortest digits that give back the same double. JSON has no NaN and no infinities, and most readers
/// refuse them: they are NaN, Infinity and -Infinity between `quote`s.
void append_number(std::string& out, double value, std::string_view quote);

/// To the microsecond.
void append_seconds(std::string& out, double seconds, std::string_view quote);

/// In quotes; bytes that are not UTF-8 become U+FFFD.
void append_json_text(std::string& out, std::string_view text);

/// By RFC 4180, as UTF-8. Control characters become spaces, so that a row is a line.
void append_csv_text(std::string& out, std::string_view text);

/// One object of JSON on one line.
class JsonLine {
 public:
  /// Both come first in every record: the reader of a log that is resumed looks no further.
  void begin(std::string_view kind, int64_t step);
  void integer(std::string_view key, int64_t value);
  void number(std::string_view key, double value);
  void seconds(std::string_view key, double value);
  void flag(std::string_view key, bool value);
  void text(std::string_view key, std::string_view value);
  void list(std::string_view key, std::span<const int64_t> values);
  void list(std::string_view key, std::span<const double> values);
  void list(std::string_view key, std::span<const std::string> values);
  void open(std::string_view key);  ///< an object within
  void close();
  /// The line, until `begin` is called again.
  std::string_view end();

 private:
  void key(std::string_view key);

  std::string line_;
};

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
std::string_view probe_line(JsonLine& line, const ProbeRecord& record);
std::string_view shadow_line(JsonLine& line, const ShadowRecord& record);
std::string_view culprit_line(JsonLine& line, const CulpritRecord& record);
std::string_view finding_line(JsonLine& line, const FindingRecord& record);
std::string_view end_line(JsonLine& line, int64_t step, double seconds, std::string_view outcome,
                          std::string_view why);

}  // namespace halfstep::log
