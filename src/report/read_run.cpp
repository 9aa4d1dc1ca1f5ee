#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <memory>

#include "io/file_error.h"
#include "words/names.h"
#include "report/report.h"
#include "report/fields.h"

namespace halfstep {
namespace {

using report::BadRecord;
using report::Fields;

/// A word that pages and sentences repeat. No version of Halfstep has written a longer one.
const std::string& word_of(const Fields& fields, std::string_view name) {
  constexpr size_t kMostBytes = 200;
  const std::string& word = fields.text(name);
  if (word.size() > kMostBytes)
    throw BadRecord(
        detail::concat("has a '", name, "' of ", word.size(), " bytes; at most ", kMostBytes, " are read."));
  return word;
}

MemoryRecord memory_of(const Fields& fields) {
  MemoryRecord memory{.live_bytes = fields.integer("live_bytes"), .peak_bytes = fields.integer("peak_bytes")};
  const Fields classes = fields.within("classes");
  for (const std::string_view name : classes.names()) {
    const Fields one = classes.within(name);
    memory.classes.push_back({.name = std::string(name),
                              .live_bytes = one.integer("live_bytes"),
                              .peak_bytes = one.integer("peak_bytes")});
  }
  return memory;
}

PhaseSeconds phases_of(const Fields& fields) {
  return {.forward = fields.number("forward"),
          .backward = fields.number("backward"),
          .inspect = fields.number("inspect"),
          .step = fields.number("step"),
          .data = fields.number("data"),
          .other = fields.number("other")};
}

StepRecord step_of(const Fields& fields) {
  StepRecord record{.step = fields.integer("step"),
                    .seconds = fields.number("seconds"),
                    .loss = fields.number("loss"),
                    .lr = fields.number("lr"),
                    .grad_norm = fields.number("grad_norm"),
                    .tokens = fields.integer("tokens"),
                    .tokens_per_second = fields.number("tokens_per_second"),
                    .loss_scale = fields.perhaps("loss_scale"),
                    .skipped = fields.flag("skipped"),
                    .stalled_share = fields.perhaps("stalled_share"),
                    .share_of_peak = fields.perhaps("share_of_peak"),
                    .evaluation_loss = fields.perhaps("evaluation_loss"),
                    .phases = phases_of(fields.within("phases"))};
  if (record.skipped) {
    record.why = fields.text("why");
    record.parameter = fields.text("parameter");
  }
  if (fields.has("memory")) record.memory = memory_of(fields.within("memory"));
  return record;
}

RunHistory::Sitting sitting_of(const Fields& fields) {
  const int64_t schema = fields.integer("schema");
  if (schema != RunLog::kSchema)
    throw BadRecord(detail::concat("is of schema ", schema, "; this Halfstep (", HALFSTEP_VERSION, ") reads ",
                                   RunLog::kSchema, ". Read it with the version that wrote it."));
  RunHistory::Sitting sitting{
      .after_step = fields.integer("step"),
      .halfstep = word_of(fields, "halfstep"),
      .unix_time = fields.number("unix_time"),
      .header = {
          .configuration = fields.text("configuration"), .machine = {}, .unit = word_of(fields, "unit")}};
  const Fields machine = fields.within("machine");
  for (const std::string_view name : machine.names())
    sitting.header.machine.emplace_back(name, machine.text(name));
  return sitting;
}

/// Takes one record after another.
class HistoryBuilder {
 public:
  explicit HistoryBuilder(RunHistory& run) : run_(run) {}

  void take(const Fields& fields) {
    const std::string& kind = word_of(fields, "kind");
    const int64_t step = fields.integer("step");
    if (step < latest_step_)
      throw BadRecord(detail::concat("is of step ", step, ", after one of step ", latest_step_, "."));
    if (run_.sittings.empty() && kind != "run")
      throw BadRecord(detail::concat("is of kind ", in_quotes(kind), "; a log begins with 'run'."));
    latest_step_ = step;
    if (kind == "step") return take_step(fields);
    if (kind == "run") return run_.sittings.push_back(sitting_of(fields));
    const auto seconds = [&] { return fields.number("seconds"); };
    if (kind == "evaluation")
      run_.evaluations.push_back({.step = step,
                                  .seconds = seconds(),
                                  .loss = fields.number("loss"),
                                  .accuracy = fields.perhaps("accuracy"),
                                  .tokens = fields.integer("tokens"),
                                  .duration_seconds = fields.number("duration_seconds")});
    else if (kind == "sample")
      run_.samples.push_back(
          {.step = step, .seconds = seconds(), .prompt = fields.text("prompt"), .text = fields.text("text")});
    else if (kind == "note")
      run_.notes.push_back({.step = step, .seconds = seconds(), .text = fields.text("text")});
    else if (kind == "checkpoint")
      run_.checkpoints.push_back({.step = step,
                                  .seconds = seconds(),
                                  .saved_step = fields.integer("saved_step"),
                                  .tensor_bytes = fields.integer("tensor_bytes")});
    else if (kind == "end")
      run_.sittings.back().end = RunHistory::End{.step = step,
                                                 .seconds = seconds(),
                                                 .outcome = word_of(fields, "outcome"),
                                                 .why = fields.text("why")};
    else
      ++run_.unknown_kinds[kind];
  }

 private:
  void take_step(const Fields& fields) {
    StepRecord record = step_of(fields);
    if (!run_.steps.empty() && run_.steps.back().step == record.step)
      throw BadRecord(detail::concat("tells step ", record.step, " again."));
    run_.steps.push_back(std::move(record));
  }

  RunHistory& run_;
  int64_t latest_step_ = 0;
};

[[noreturn]] void refuse(const std::filesystem::path& path, int64_t line, std::string_view fault) {
  throw FileError(detail::concat(path.string(), ": line ", line, " ", fault), EBADMSG);
}

std::ifstream opened(const std::filesystem::path& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) files::throw_file_error("open", path);
  if (!S_ISREG(status.st_mode)) throw FileError(path.string() + ": is not a regular file.", EINVAL);
  std::ifstream file(path, std::ios::binary);
  if (!file) files::throw_file_error("open", path);
  return file;
}

std::string name_of(const std::filesystem::path& folder) {
  const auto whole = std::filesystem::absolute(folder).lexically_normal();
  const auto name = whole.has_filename() ? whole.filename() : whole.parent_path().filename();
  return name.empty() ? whole.string() : name.string();
}

}  // namespace

RunHistory read_run(const std::filesystem::path& folder) {
  const auto path = folder / "log.jsonl";
  std::ifstream file = opened(path);
  RunHistory run{.name = name_of(folder)};
  HistoryBuilder builder(run);
  report::RecordReader reader;
  // Not std::getline, which would first read a line of any length: a file may have a hole of terabytes.
  constexpr size_t kMostLineBytes = size_t{16} << 20;
  const auto line = std::make_unique_for_overwrite<char[]>(kMostLineBytes + 1);
  for (int64_t number = 1;; ++number) {
    file.getline(line.get(), static_cast<std::streamsize>(kMostLineBytes) + 1);
    const auto bytes = static_cast<size_t>(file.gcount());
    run.last_line_cut = file.eof() && bytes > 0;  // a process died there, or is writing it
    if (file.eof() || file.bad()) break;
    if (file.fail())
      refuse(path, number, detail::concat("has more than ", kMostLineBytes, " bytes; it is no record."));
    try {
      builder.take(Fields(reader, std::string_view(line.get(), bytes - 1)));
    } catch (const BadRecord& fault) {
      refuse(path, number, fault.what());
    }
  }
  if (file.bad()) files::throw_file_error("read", path);
  if (run.sittings.empty())
    throw FileError(path.string() + ": has no record yet. A run writes the first when it begins.", EBADMSG);
  return run;
}

}  // namespace halfstep
