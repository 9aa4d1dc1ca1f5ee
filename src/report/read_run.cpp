#include <halfstep/error.h>
#include <halfstep/printable.h>

#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>
#include <sys/stat.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "io/durable_file.h"
#include "io/file_error.h"
#include "report/figures.h"
#include "report/run_report.h"
#include "words/names.h"

namespace halfstep::report {
namespace {

// The fields of one record of a log, by name and type.

/// What a log may hold that this reader cannot use: told with file and line by whoever knows them.
class BadRecord : public Error {
 public:
  using Error::Error;
};

/// One line after another, kept flat as the parser tells of it: a tree of JSON takes three times as long, and
/// a log has a line for each step. The memory of a line is used again for the next.
class RecordReader {
 public:
  struct Object {};
  struct List {};
  struct Other {};  // null: no record of this version has one
  struct Field {
    std::string name{};  // empty in a list
    size_t within = 0;   // index of the object or list that holds it
    std::variant<Object, List, Other, bool, int64_t, double, std::string> value{};
  };

  /// The fields of `line` until the next call; the first is the record itself.
  const std::vector<Field>& read(std::string_view line);
  size_t count() const { return count_; }

 private:
  template <typename Value>
  bool put(Value&& value);
  template <typename Value>
  bool open(Value value);
  bool close();
  Field& add();

  // What RapidJSON calls.
  friend rapidjson::Reader;
  bool Null() { return put(Other{}); }
  bool Bool(bool value) { return put(value); }
  bool Int(int value) { return put(int64_t{value}); }
  bool Uint(unsigned value) { return put(int64_t{value}); }
  bool Int64(int64_t value) { return put(value); }
  bool Uint64(uint64_t value);
  bool Double(double value) { return put(value); }
  bool RawNumber(const char*, rapidjson::SizeType, bool) { return false; }  // of a flag that is not set
  bool String(const char* text, rapidjson::SizeType bytes, bool) { return put(std::string(text, bytes)); }
  bool Key(const char* name, rapidjson::SizeType bytes, bool);
  bool StartObject() { return open(Object{}); }
  bool EndObject(rapidjson::SizeType) { return close(); }
  bool StartArray() { return open(List{}); }
  bool EndArray(rapidjson::SizeType) { return close(); }

  rapidjson::Reader parser_{};
  std::vector<Field> fields_{};
  size_t count_ = 0;
  std::vector<size_t> open_{};
};

/// An object of the record that was read last. Fields that nobody asks for are left alone: later versions may
/// add some.
class Fields {
 public:
  Fields(RecordReader& reader, std::string_view line) : all_(reader.read(line)), count_(reader.count()) {}

  int64_t integer(std::string_view name) const;
  /// A number, or one of the words for those that JSON has not.
  double number(std::string_view name) const;
  /// Of a power of two, which may be negative.
  int64_t exponent(std::string_view name) const;
  bool flag(std::string_view name) const;
  const std::string& text(std::string_view name) const;
  std::optional<double> perhaps(std::string_view name) const;
  bool has(std::string_view name) const { return find(name) != nullptr; }
  Fields within(std::string_view name) const;
  std::vector<int64_t> integers(std::string_view name) const;
  std::vector<double> numbers(std::string_view name) const;
  std::vector<std::string> texts(std::string_view name) const;

  /// In the order of the line.
  std::vector<std::string_view> names() const;

 private:
  Fields(const Fields& outer, size_t object)
      : all_(outer.all_), count_(outer.count_), object_(object), next_(object) {}
  const RecordReader::Field* find(std::string_view name) const;
  const RecordReader::Field& at(std::string_view name) const;
  template <typename Value>
  std::vector<Value> list(std::string_view name, const char* wanted) const;

  const std::vector<RecordReader::Field>& all_;
  size_t count_;
  size_t object_ = 0;
  mutable size_t next_ = 0;  // where to look first: fields are mostly asked for in the order of the line
};

using Field = RecordReader::Field;

constexpr size_t kMostFields = 100'000, kMostNesting = 16;

[[noreturn]] void refuse(std::string_view name, const char* wanted) {
  throw BadRecord(detail::concat("has a '", name, "' that is not ", wanted, "."));
}

const std::vector<Field>& RecordReader::read(std::string_view line) {
  // RapidJSON takes a NUL for the end of the text.
  if (line.find('\0') != std::string_view::npos) throw BadRecord("has a NUL byte.");
  if (fields_.empty()) fields_.emplace_back();
  fields_.front() = {.within = std::numeric_limits<size_t>::max(), .value = Other{}};
  count_ = 1;
  open_.clear();
  // Iterative: nesting must not end the stack.
  constexpr unsigned kFlags = rapidjson::kParseIterativeFlag | rapidjson::kParseFullPrecisionFlag |
                              rapidjson::kParseValidateEncodingFlag;
  rapidjson::MemoryStream stream(line.data(), line.size());
  if (const auto end = parser_.Parse<kFlags>(stream, *this); end.IsError())
    throw BadRecord(detail::concat("is not valid JSON: ", rapidjson::GetParseError_En(end.Code()), " Byte ",
                                   end.Offset() + 1, "."));
  if (!std::holds_alternative<Object>(fields_.front().value)) throw BadRecord("is not a JSON object.");
  return fields_;
}

Field& RecordReader::add() {
  if (count_ == kMostFields) throw BadRecord("has too many fields for a record.");
  if (fields_.size() == count_) fields_.emplace_back();
  Field& field = fields_[count_++];
  field.within = open_.back();
  return field;
}

template <typename Value>
bool RecordReader::put(Value&& value) {
  const bool in_list = !open_.empty() && std::holds_alternative<List>(fields_[open_.back()].value);
  if (in_list) add().name.clear();
  fields_[count_ - 1].value = std::forward<Value>(value);
  return true;
}

template <typename Value>
bool RecordReader::open(Value value) {
  put(value);
  open_.push_back(count_ - 1);
  if (open_.size() > kMostNesting) throw BadRecord("is nested too deeply for a record.");
  return true;
}

bool RecordReader::close() {
  open_.pop_back();
  return true;
}

bool RecordReader::Uint64(uint64_t value) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    return put(static_cast<int64_t>(value));
  return put(static_cast<double>(value));
}

bool RecordReader::Key(const char* name, rapidjson::SizeType bytes, bool) {
  add().name.assign(name, bytes);
  return true;
}

const Field* Fields::find(std::string_view name) const {
  for (size_t tried = 0; tried < count_; ++tried) {
    const size_t i = next_ + tried < count_ ? next_ + tried : next_ + tried - count_;
    if (all_[i].within != object_ || all_[i].name != name) continue;
    next_ = i + 1 < count_ ? i + 1 : 0;
    return &all_[i];
  }
  return nullptr;
}

const Field& Fields::at(std::string_view name) const {
  const Field* const field = find(name);
  if (field == nullptr) throw BadRecord(detail::concat("has no '", name, "'."));
  return *field;
}

int64_t Fields::integer(std::string_view name) const {
  const auto* const value = std::get_if<int64_t>(&at(name).value);
  if (value == nullptr || *value < 0 || *value > kMostInteger) refuse(name, "a whole number from 0 to 2^53");
  return *value;
}

int64_t Fields::exponent(std::string_view name) const {
  const auto* const value = std::get_if<int64_t>(&at(name).value);
  if (value == nullptr) refuse(name, "a whole number");
  return *value;
}

/// Nothing where it is none.
std::optional<double> number_in(const Field& field) {
  const auto& value = field.value;
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (const auto* word = std::get_if<std::string>(&value)) {
    if (*word == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (*word == "Infinity") return kInfinity;
    if (*word == "-Infinity") return -kInfinity;
  }
  return std::nullopt;
}

double Fields::number(std::string_view name) const {
  if (const auto number = number_in(at(name))) return *number;
  refuse(name, "a number, \"NaN\", \"Infinity\" or \"-Infinity\"");
}

bool Fields::flag(std::string_view name) const {
  const auto* const value = std::get_if<bool>(&at(name).value);
  if (value == nullptr) refuse(name, "true or false");
  return *value;
}

const std::string& Fields::text(std::string_view name) const {
  const auto* const value = std::get_if<std::string>(&at(name).value);
  if (value == nullptr) refuse(name, "a text");
  return *value;
}

std::optional<double> Fields::perhaps(std::string_view name) const {
  if (!has(name)) return {};
  return number(name);
}

Fields Fields::within(std::string_view name) const {
  const Field& field = at(name);
  if (!std::holds_alternative<RecordReader::Object>(field.value)) refuse(name, "an object");
  return {*this, static_cast<size_t>(&field - all_.data())};
}

template <typename Value>
std::vector<Value> Fields::list(std::string_view name, const char* wanted) const {
  const Field& field = at(name);
  if (!std::holds_alternative<RecordReader::List>(field.value)) refuse(name, wanted);
  const auto list = static_cast<size_t>(&field - all_.data());
  std::vector<Value> values;
  for (size_t i = list + 1; i < count_ && all_[i].within >= list; ++i) {
    std::optional<Value> value;
    if constexpr (std::is_same_v<Value, double>)
      value = number_in(all_[i]);
    else if (const auto* found = std::get_if<Value>(&all_[i].value))
      value = *found;
    if (!value) refuse(name, wanted);
    values.push_back(*std::move(value));
  }
  return values;
}

std::vector<int64_t> Fields::integers(std::string_view name) const {
  return list<int64_t>(name, "a list of whole numbers");
}

std::vector<double> Fields::numbers(std::string_view name) const {
  return list<double>(name, "a list of numbers");
}

std::vector<std::string> Fields::texts(std::string_view name) const {
  return list<std::string>(name, "a list of texts");
}

std::vector<std::string_view> Fields::names() const {
  std::vector<std::string_view> names;
  for (size_t i = object_ + 1; i < count_; ++i)
    if (all_[i].within == object_) names.emplace_back(all_[i].name);
  return names;
}

}  // namespace
}  // namespace halfstep::report

namespace halfstep {
namespace {

using report::BadRecord;
using report::Fields;

/// A word that pages and sentences repeat. No version of Halfstep has written a longer one.
const std::string& word_of(const Fields& fields, std::string_view name, size_t most_bytes = 200) {
  const std::string& word = fields.text(name);
  if (word.size() > most_bytes)
    throw BadRecord(
        detail::concat("has a '", name, "' of ", word.size(), " bytes; at most ", most_bytes, " are read."));
  return word;
}

/// Of a layer: as long as the names of the modules that it is in are together.
const std::string& layer_of(const Fields& fields, std::string_view name) {
  return word_of(fields, name, 16384);
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
                    .items = fields.integer("items"),
                    .items_per_second = fields.number("items_per_second"),
                    .loss_scale = fields.perhaps("loss_scale"),
                    .skipped = fields.flag("skipped"),
                    .stalled_share = fields.perhaps("stalled_share"),
                    .saturated_share = fields.perhaps("saturated_share"),
                    .vanished_share = fields.perhaps("vanished_share"),
                    .share_of_peak = fields.perhaps("share_of_peak"),
                    .evaluation_loss = fields.perhaps("evaluation_loss"),
                    .phases = phases_of(fields.within("phases"))};
  if (record.skipped) {
    record.why = fields.text("why");
    record.parameter = fields.text("parameter");
  }
  if (fields.has("stalled_most")) record.stalled_most = fields.text("stalled_most");
  if (fields.has("saturated_most")) record.saturated_most = fields.text("saturated_most");
  if (fields.has("vanished_most")) record.vanished_most = fields.text("vanished_most");
  if (fields.has("rank_losses")) record.rank_losses = fields.numbers("rank_losses");
  if (fields.has("memory")) record.memory = memory_of(fields.within("memory"));
  return record;
}

/// As TensorStats::packed() has them, checked.
std::vector<int64_t> packed_of(const Fields& fields) {
  constexpr size_t kFractions = 6;  // of a binade, beside its count
  const std::vector<int64_t> counts = fields.integers("exponents"), fractions = fields.integers("fractions");
  const std::vector<int64_t> saturated = fields.integers("saturated");
  if (fractions.size() != kFractions * counts.size() || saturated.size() != TensorStats{}.saturated.size())
    throw BadRecord("has lists of 'exponents', 'fractions' and 'saturated' that do not match.");
  std::vector<int64_t> packed = {fields.integer("zeros"), fields.integer("nans"),
                                 fields.integer("infinities"), std::bit_cast<int64_t>(fields.number("sum")),
                                 std::bit_cast<int32_t>(static_cast<float>(fields.number("amax")))};
  packed.insert(packed.end(), saturated.begin(), saturated.end());
  packed.push_back(fields.exponent("first_exponent"));
  for (size_t i = 0; i < counts.size(); ++i) {
    packed.push_back(counts[i]);
    const auto first = fractions.begin() + static_cast<std::ptrdiff_t>(kFractions * i);
    packed.insert(packed.end(), first, first + kFractions);
  }
  try {
    (void)TensorStats::unpacked(packed);
  } catch (const Error& error) {
    throw BadRecord(detail::concat("has no statistics of a tensor: ", error.what()));
  }
  return packed;
}

CulpritRecord culprit_of(const Fields& fields) {
  return {.step = fields.integer("step"),
          .seconds = fields.number("seconds"),
          .rank = fields.integer("rank"),
          // Earlier versions told of the first alone.
          .ranks = fields.has("ranks") ? fields.integers("ranks") : std::vector<int64_t>(),
          .op = word_of(fields, "op"),
          .inside = word_of(fields, "inside"),
          .layer = layer_of(fields, "layer"),
          .direction = word_of(fields, "direction"),
          .inputs = fields.texts("inputs"),
          .output = fields.text("output"),
          .precision_is_cause = fields.flag("precision_is_cause"),
          .verdict = fields.text("verdict"),
          .propagated = fields.integer("propagated")};
}

Severity severity_of(const Fields& fields) {
  for (const Severity severity : {Severity::Note, Severity::Warning, Severity::Serious})
    if (fields.text("severity") == to_string(severity)) return severity;
  throw BadRecord("has a 'severity' that is not 'note', 'warning' or 'serious'.");
}

FindingRecord finding_of(const Fields& fields) {
  const auto perhaps = [&](std::string_view name) {
    return fields.has(name) ? word_of(fields, name) : std::string();
  };
  return {.step = fields.integer("step"),
          .seconds = fields.number("seconds"),
          .finding = {.code = word_of(fields, "code"),
                      .severity = severity_of(fields),
                      .step = fields.integer("began"),
                      .what = fields.text("what"),
                      .evidence = fields.text("evidence"),
                      .remedy = fields.text("remedy"),
                      .layer = perhaps("layer"),
                      .op = perhaps("op")}};
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
  // Logs of earlier versions do not say: one, or more.
  if (fields.has("ranks")) sitting.header.ranks = fields.integer("ranks");
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
                                  .items = fields.integer("items"),
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
    else if (kind == "probe")
      take_probe({.step = step,
                  .seconds = seconds(),
                  .role = word_of(fields, "role"),
                  .name = layer_of(fields, "name"),
                  .packed = packed_of(fields),
                  .summed_parts = fields.has("summed_parts") ? fields.integer("summed_parts") : 1,
                  .sum_type = fields.has("sum_type") ? word_of(fields, "sum_type") : ""});
    else if (kind == "shadow")
      run_.shadows.push_back({.step = step,
                              .seconds = seconds(),
                              .precision = word_of(fields, "precision"),
                              .layer = layer_of(fields, "layer"),
                              .output_error = fields.number("output_error"),
                              .input_grad_error = fields.number("input_grad_error"),
                              .weight_grad_error = fields.number("weight_grad_error"),
                              .forward_noise = fields.number("forward_noise"),
                              .backward_noise = fields.number("backward_noise"),
                              .gradient_share = fields.number("gradient_share")});
    else if (kind == "culprit")
      run_.culprits.push_back(culprit_of(fields));
    else if (kind == "finding")
      run_.findings.push_back(finding_of(fields));
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
      throw BadRecord(detail::concat("repeats step ", record.step, "."));
    run_.steps.push_back(std::move(record));
  }

  /// Of more than memory should hold, those of every second step that was looked at, and so on.
  void take_probe(RunHistory::Probe probe) {
    constexpr size_t kMostProbes = 20'000;
    if (probe.step != probed_step_) ++probed_steps_, probed_step_ = probe.step;
    if (probed_steps_ % probe_stride_ != 0) return;
    run_.probes.push_back(std::move(probe));
    if (run_.probes.size() < kMostProbes) return;
    int64_t kept_step = -1, steps = 0;
    std::erase_if(run_.probes, [&](const RunHistory::Probe& each) {
      if (each.step != kept_step) ++steps, kept_step = each.step;
      return steps % 2 == 1;
    });
    probe_stride_ *= 2;
  }

  RunHistory& run_;
  int64_t latest_step_ = 0;
  int64_t probed_step_ = -1, probed_steps_ = 0, probe_stride_ = 1;
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

}  // namespace

RunHistory read_run(const std::filesystem::path& folder) {
  const auto path = folder / "log.jsonl";
  std::ifstream file = opened(path);
  RunHistory run{.name = files::folder_name(folder)};
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
      refuse(path, number, detail::concat("has more than ", kMostLineBytes, " bytes; it is not a record."));
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
