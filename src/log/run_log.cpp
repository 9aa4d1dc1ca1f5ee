#include <halfstep/error.h>
#include <halfstep/run_log.h>

#include <system_error>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "io/durable_file.h"
#include "io/input_file.h"
#include "io/json.h"
#include "log/append_file.h"
#include "log/record_text.h"
#include "words/names.h"

namespace halfstep::log {
namespace {

// Where the log of a run that is resumed has to end.

struct LogEnd {
  uint64_t bytes = 0;         ///< to be kept
  int64_t latest_step = 0;    ///< of a record that is kept
  int64_t recorded_step = 0;  ///< of the last record of a step; 0 if there is none
  std::string step_record{};  ///< the last one of a step; empty if there is none
};

/// All records up to `step`, without a last line that was cut or lines at the end that are no records. An
/// Error if the file is not a log of ours.
LogEnd end_of_jsonl(const std::filesystem::path& path, int64_t step);
LogEnd end_of_csv(const std::filesystem::path& path, int64_t step);

constexpr size_t kLongestLine = size_t{64} << 20;

struct LineStep {
  int64_t step;
  bool of_step;  // a record of kind "step", or a row
};

std::optional<int64_t> integer_before(std::string_view text, char end) {
  int64_t value = 0;
  const auto [stop, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc{} || stop == text.data() + text.size() || *stop != end || value < 0) return {};
  return value;
}

/// {"kind":"step","step":17, ...: no more of the line is read, a log may have millions of them.
std::optional<LineStep> step_of_record(std::string_view line) {
  constexpr std::string_view kKind = "{\"kind\":\"", kStep = "\",\"step\":";
  if (!line.starts_with(kKind) || !line.ends_with('}')) return {};
  line.remove_prefix(kKind.size());
  const size_t end = line.find('"');
  if (end == std::string_view::npos || !line.substr(end).starts_with(kStep)) return {};
  const std::optional<int64_t> step = integer_before(line.substr(end + kStep.size()), ',');
  if (!step) return {};
  return LineStep{.step = *step, .of_step = line.substr(0, end) == "step"};
}

std::optional<LineStep> step_of_row(std::string_view line) {
  const std::optional<int64_t> step = integer_before(line, ',');
  if (!step) return {};
  return LineStep{.step = *step, .of_step = true};
}

/// `take` gets every whole line, without its \n, and says whether to go on.
template <typename Take>
void each_line(const std::filesystem::path& path, Take take) {
  constexpr size_t kBlockBytes = size_t{1} << 20;
  const files::InputFile file(path);
  std::string text;  // from the beginning of a line on
  for (uint64_t offset = 0; offset < file.size();) {
    const size_t before = text.size();
    text.resize(before + std::min<uint64_t>(kBlockBytes, file.size() - offset));
    file.read(offset, std::as_writable_bytes(std::span(text).subspan(before)));
    offset += text.size() - before;
    size_t begin = 0;
    for (size_t end = text.find('\n', before); end != std::string::npos; end = text.find('\n', begin)) {
      if (!take(std::string_view(text).substr(begin, end - begin))) return;
      begin = end + 1;
    }
    text.erase(0, begin);
    if (text.size() > kLongestLine) return;  // no record of ours: as a last line that was cut
  }
}

/// Lines that are no records. A power cut leaves them behind what was synced: they are cut off with the
/// records of later steps. In the middle of a log they are somebody's damage.
class Rubbish {
 public:
  explicit Rubbish(const std::filesystem::path& path) : path_(path) {}

  bool note(int64_t number, std::string_view line) {
    HALFSTEP_CHECK(number > 1, path_.string(), ": line 1 is not a Halfstep record: ", in_quotes(line),
                   ". Move the file away; a resumed run then starts a new one.");
    if (first_ == 0) {
      first_ = number;
      text_ = in_quotes(line);
    }
    return true;  // to the next line
  }

  void check_nothing_follows(int64_t number) const {
    HALFSTEP_CHECK(first_ == 0, path_.string(), ": line ", first_, " is not a Halfstep record: ", text_,
                   ", and line ", number,
                   " after it is. Move the file away; a resumed run then starts a new one.");
  }

 private:
  const std::filesystem::path& path_;
  int64_t first_ = 0;
  std::string text_;
};

LogEnd end_of_jsonl(const std::filesystem::path& path, int64_t step) {
  LogEnd end;
  int64_t number = 0;
  Rubbish rubbish(path);
  each_line(path, [&](std::string_view line) {
    ++number;
    const std::optional<LineStep> found = step_of_record(line);
    if (!found) return rubbish.note(number, line);
    if (found->step > step) return false;
    rubbish.check_nothing_follows(number);
    end.bytes += line.size() + 1;
    end.latest_step = std::max(end.latest_step, found->step);
    if (found->of_step) end.step_record = line, end.recorded_step = found->step;
    return true;
  });
  return end;
}

LogEnd end_of_csv(const std::filesystem::path& path, int64_t step) {
  LogEnd end;
  int64_t number = 0;
  Rubbish rubbish(path);
  each_line(path, [&](std::string_view line) {
    ++number;
    const bool columns = number == 1;
    const std::optional<LineStep> found = columns ? LineStep{.step = 0, .of_step = false} : step_of_row(line);
    HALFSTEP_CHECK(!columns || line == kCsvColumns.substr(0, kCsvColumns.size() - 1), path.string(),
                   ": line 1 is not the columns of this version's log: ", in_quotes(line),
                   ". Move the file away; a resumed run then starts a new one.");
    if (!found) return rubbish.note(number, line);
    if (found->step > step) return false;
    rubbish.check_nothing_follows(number);
    end.bytes += line.size() + 1;
    end.latest_step = std::max(end.latest_step, found->step);
    return true;
  });
  return end;
}

}  // namespace
}  // namespace halfstep::log

namespace halfstep {

using log::AppendFile;
using log::JsonLine;

namespace {

// A disk that stays full for days must not fill the memory as well.
constexpr size_t kMostRefused = size_t{64} << 20;

// Of what was refused, at a time: a disk that is still full is asked for little.
constexpr size_t kRetriedAtOnce = size_t{64} << 10;

/// What the disk refuses is kept, and written before the next record.
struct PatientFile {
  AppendFile file;
  std::string refused{};  // whole lines
  int64_t lost = 0;       // records for which there was no room in memory either

  int64_t unwritten() const { return lost + std::ranges::count(refused, '\n'); }

  void append(std::string_view record) {
    if (refused.empty()) {
      try {
        return file.append(record);
      } catch (const FileError&) {
        refused = record;
        throw;
      }
    }
    if (refused.size() + record.size() <= kMostRefused)
      refused += record;
    else
      ++lost;
    retry();
  }

  void retry() {
    size_t written = 0;
    try {
      while (written < refused.size()) {
        const std::string_view rest = std::string_view(refused).substr(written);
        const size_t last_end = rest.substr(0, kRetriedAtOnce).rfind('\n');
        const size_t end = last_end != rest.npos ? last_end : rest.find('\n');
        file.append(rest.substr(0, end + 1));
        written += end + 1;
      }
    } catch (const FileError&) {
      refused.erase(0, written);
      throw;
    }
    refused.clear();
  }
};

}  // namespace

struct RunLog::State {
  PatientFile jsonl;
  PatientFile csv;
  int64_t latest_step = 0;     // of any record
  int64_t latest_written = 0;  // of a step's record
  double seconds_before = 0.0;
  int64_t recorded_before = 0;
  JsonLine line{};
  std::string row{};

  void append(int64_t step, std::string_view text) {
    HALFSTEP_CHECK(step >= latest_step, jsonl.file.path().string(), ": a record of step ", step,
                   " after one of step ", latest_step, "; records come in the order of their steps.");
    latest_step = step;
    jsonl.append(text);
  }
};

namespace {

constexpr std::string_view kJsonl = "log.jsonl", kCsv = "log.csv";

// 0 if there is no step, or no number: a log that was cut says nothing of its time.
double seconds_of(const std::string& step_record, const std::filesystem::path& path) {
  if (step_record.empty()) return 0.0;
  const nlohmann::json record = files::read_json(step_record, path.string());
  const auto seconds = record.find("seconds");
  return seconds != record.end() && seconds->is_number() ? seconds->get<double>() : 0.0;
}

struct LogEnds {
  bool has_jsonl = false, has_csv = false;
  log::LogEnd jsonl{}, csv{};
};

/// Where the records up to a step end in both files. Both are looked at even if one is refused: what has to
/// be moved away is told at once.
LogEnds ends_of(const std::filesystem::path& folder, int64_t step) {
  HALFSTEP_CHECK(step >= 0, folder.string(), ": resumed after step ", step, "; steps count from 1.");
  const auto jsonl = folder / kJsonl, csv = folder / kCsv;
  std::error_code unknown;  // then it is created, which is refused for the same reason
  LogEnds ends{.has_jsonl = std::filesystem::exists(jsonl, unknown),
               .has_csv = std::filesystem::exists(csv, unknown)};
  std::string faults;
  const auto look = [&](log::LogEnd& into, auto&& reader, const std::filesystem::path& path) {
    try {
      into = reader(path, step);
    } catch (const FileError&) {
      throw;
    } catch (const Error& error) {
      faults += (faults.empty() ? "" : " ") + std::string(error.what());
    }
  };
  if (ends.has_jsonl) look(ends.jsonl, log::end_of_jsonl, jsonl);
  if (ends.has_csv) look(ends.csv, log::end_of_csv, csv);
  if (!faults.empty()) throw Error(faults);
  return ends;
}

}  // namespace

RunLog::RunLog(std::unique_ptr<State> state) : state_(std::move(state)) {}
RunLog::~RunLog() = default;
RunLog::RunLog(RunLog&&) noexcept = default;
RunLog& RunLog::operator=(RunLog&&) noexcept = default;

RunLog RunLog::create(const std::filesystem::path& folder, const RunHeader& header) {
  std::unique_ptr<State> state(
      new State{.jsonl = {AppendFile::create(folder / kJsonl)}, .csv = {AppendFile::create(folder / kCsv)}});
  state->append(0, log::run_line(state->line, header, 0));
  state->csv.append(log::kCsvColumns);
  files::sync_folder(folder);
  return RunLog(std::move(state));
}

RunLog RunLog::resume(const std::filesystem::path& folder, const RunHeader& header, int64_t step) {
  // Both are looked through before either is cut: a file that is refused leaves the other as it was.
  const auto [has_jsonl, has_csv, end, csv_end] = ends_of(folder, step);
  const auto jsonl = folder / kJsonl, csv = folder / kCsv;
  const double seconds_before = seconds_of(end.step_record, jsonl);
  // Of a run that begins anew nothing is kept: what was told before its first step is told again.
  const bool anew = step == 0;
  std::unique_ptr<State> state(new State{
      .jsonl = {has_jsonl ? AppendFile::keep(jsonl, anew ? 0 : end.bytes) : AppendFile::create(jsonl)},
      .csv = {has_csv ? AppendFile::keep(csv, anew ? 0 : csv_end.bytes) : AppendFile::create(csv)},
      .latest_step = anew ? 0 : end.latest_step,
      .latest_written = step,
      .seconds_before = seconds_before,
      .recorded_before = anew ? 0 : end.recorded_step,
  });
  const auto attempt = [](auto&& body) {
    try {
      body();
    } catch (const FileError&) {  // kept, as every record that the disk refuses
    }
  };
  attempt([&] { state->append(step, log::run_line(state->line, header, step)); });
  if (state->csv.file.size() == 0) attempt([&] { state->csv.append(log::kCsvColumns); });
  files::sync_folder(folder);
  return RunLog(std::move(state));
}

void RunLog::check_resumable(const std::filesystem::path& folder, int64_t step) { ends_of(folder, step); }

void RunLog::step(const StepRecord& record) {
  HALFSTEP_CHECK(record.step > state_->latest_written, state_->jsonl.file.path().string(), ": step ",
                 record.step, " after step ", state_->latest_written,
                 "; each step occurs once in a log, in order.");
  state_->latest_written = record.step;
  std::optional<FileError> refusal;
  const auto attempt = [&](auto&& body) {
    try {
      body();
    } catch (const FileError& error) {
      refusal = error;
    }
  };
  attempt([&] { state_->append(record.step, log::step_line(state_->line, record)); });
  attempt([&] { state_->csv.append(log::step_row(state_->row, record)); });
  if (refusal) throw FileError(*refusal);
}

void RunLog::evaluation(const EvaluationRecord& record) {
  state_->append(record.step, log::evaluation_line(state_->line, record));
}

void RunLog::sample(const SampleRecord& record) {
  state_->append(record.step, log::sample_line(state_->line, record));
}

void RunLog::note(int64_t step, double seconds, std::string_view text) {
  state_->append(step, log::note_line(state_->line, step, seconds, text));
}

void RunLog::checkpoint(const CheckpointRecord& record) {
  state_->append(record.step, log::checkpoint_line(state_->line, record));
}

void RunLog::probe(const ProbeRecord& record) {
  state_->append(record.step, log::probe_line(state_->line, record));
}

void RunLog::shadow(const ShadowRecord& record) {
  state_->append(record.step, log::shadow_line(state_->line, record));
}

void RunLog::culprit(const CulpritRecord& record) {
  state_->append(record.step, log::culprit_line(state_->line, record));
}

void RunLog::finding(const FindingRecord& record) {
  state_->append(record.step, log::finding_line(state_->line, record));
}

void RunLog::end(int64_t step, double seconds, std::string_view outcome, std::string_view why) {
  state_->append(step, log::end_line(state_->line, step, seconds, outcome, why));
}

void RunLog::sync() {
  for (PatientFile* each : {&state_->jsonl, &state_->csv}) {
    each->retry();
    each->file.sync();
  }
}

int64_t RunLog::lost() const { return state_->jsonl.lost; }

int64_t RunLog::unwritten() const { return std::max(state_->jsonl.unwritten(), state_->csv.unwritten()); }

int64_t RunLog::last_step(const std::filesystem::path& folder) {
  std::error_code unknown;
  if (!std::filesystem::exists(folder / kJsonl, unknown)) return 0;
  return log::end_of_jsonl(folder / kJsonl, std::numeric_limits<int64_t>::max()).latest_step;
}

double RunLog::seconds_before() const { return state_->seconds_before; }

int64_t RunLog::recorded_before() const { return state_->recorded_before; }

std::string to_json(const StepRecord& record) {
  JsonLine line;
  return std::string(log::step_line(line, record));
}

std::string to_json(const EvaluationRecord& record) {
  JsonLine line;
  return std::string(log::evaluation_line(line, record));
}

std::string to_json(const SampleRecord& record) {
  JsonLine line;
  return std::string(log::sample_line(line, record));
}

std::string to_json(const FindingRecord& record) {
  JsonLine line;
  return std::string(log::finding_line(line, record));
}

std::string_view to_string(Severity severity) {
  constexpr std::string_view kWords[] = {"note", "warning", "serious"};
  return kWords[static_cast<int>(severity)];
}

}  // namespace halfstep
