#include "log/record_text.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "words/utf8.h"

namespace halfstep::log {
namespace {

using nlohmann::json;

bool is_plain(char letter) { return letter >= 0x20 && letter < 0x7f; }

bool append_if_not_finite(std::string& out, double value, std::string_view quote) {
  if (std::isfinite(value)) return false;
  out += quote;
  out += std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  out += quote;
  return true;
}

std::string escaped(std::string_view text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

void append_integer(std::string& out, int64_t value) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

void append_number(std::string& out, double value, std::string_view quote) {
  if (append_if_not_finite(out, value, quote)) return;
  char digits[32];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

void append_seconds(std::string& out, double seconds, std::string_view quote) {
  constexpr double kMostFixed = 1e15;  // thirty million years; above it the digits would not fit
  if (!(std::abs(seconds) < kMostFixed)) return append_number(out, seconds, quote);
  char digits[32];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, seconds, std::chars_format::fixed, 6).ptr);
}

void append_json_text(std::string& out, std::string_view text) {
  const auto stands_for_itself = [](char letter) {
    return is_plain(letter) && letter != '"' && letter != '\\';
  };
  if (!std::ranges::all_of(text, stands_for_itself)) {
    out += escaped(text);
    return;
  }
  out += '"';
  out += text;
  out += '"';
}

void append_csv_text(std::string& out, std::string_view text) {
  if (text.find_first_of(",\"") == std::string_view::npos && std::ranges::all_of(text, is_plain)) {
    out += text;
    return;
  }
  out += '"';
  for (const char letter : valid_utf8(text)) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"') out += '"';
    out += code < 0x20 || code == 0x7f ? ' ' : letter;
  }
  out += '"';
}

void JsonLine::begin(std::string_view kind, int64_t step) {
  line_.clear();
  line_ += '{';
  text("kind", kind);
  integer("step", step);
}

void JsonLine::key(std::string_view key) {
  if (line_.back() != '{') line_ += ',';
  append_json_text(line_, key);
  line_ += ':';
}

void JsonLine::integer(std::string_view name, int64_t value) {
  key(name);
  append_integer(line_, value);
}

void JsonLine::number(std::string_view name, double value) {
  key(name);
  append_number(line_, value, "\"");
}

void JsonLine::seconds(std::string_view name, double value) {
  key(name);
  append_seconds(line_, value, "\"");
}

void JsonLine::flag(std::string_view name, bool value) {
  key(name);
  line_ += value ? "true" : "false";
}

void JsonLine::text(std::string_view name, std::string_view value) {
  key(name);
  append_json_text(line_, value);
}

void JsonLine::list(std::string_view name, std::span<const int64_t> values) {
  key(name);
  line_ += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) line_ += ',';
    append_integer(line_, values[i]);
  }
  line_ += ']';
}

void JsonLine::list(std::string_view name, std::span<const double> values) {
  key(name);
  line_ += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) line_ += ',';
    append_number(line_, values[i], "\"");
  }
  line_ += ']';
}

void JsonLine::list(std::string_view name, std::span<const std::string> values) {
  key(name);
  line_ += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) line_ += ',';
    append_json_text(line_, values[i]);
  }
  line_ += ']';
}

void JsonLine::open(std::string_view name) {
  key(name);
  line_ += '{';
}

void JsonLine::close() { line_ += '}'; }

std::string_view JsonLine::end() {
  line_ += "}\n";
  return line_;
}

namespace {

void put(JsonLine& line, std::string_view key, const std::optional<double>& value) {
  if (value) line.number(key, *value);
}

void put(JsonLine& line, const MemoryRecord& memory) {
  line.open("memory");
  line.integer("live_bytes", memory.live_bytes);
  line.integer("peak_bytes", memory.peak_bytes);
  line.open("classes");
  for (const MemoryRecord::Class& one : memory.classes) {
    line.open(one.name);
    line.integer("live_bytes", one.live_bytes);
    line.integer("peak_bytes", one.peak_bytes);
    line.close();
  }
  line.close();
  line.close();
}

}  // namespace

// The order of step_row.
const std::string_view kCsvColumns =
    "step,seconds,loss,lr,grad_norm,items,items_per_second,loss_scale,skipped,why,parameter,stalled_share,"
    "share_of_peak,evaluation_loss,forward_seconds,backward_seconds,inspect_seconds,step_seconds,data_"
    "seconds,"
    "other_seconds,memory_live_bytes,memory_peak_bytes\r\n";

std::string_view run_line(JsonLine& line, const RunHeader& header, int64_t after_step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  line.begin("run", after_step);
  line.integer("schema", RunLog::kSchema);
  line.text("halfstep", HALFSTEP_VERSION);
  line.seconds("unix_time", now.count());
  line.text("unit", header.unit);
  line.integer("ranks", header.ranks);
  line.text("configuration", header.configuration);
  line.open("machine");
  for (const auto& [name, value] : header.machine) line.text(name, value);
  line.close();
  return line.end();
}

std::string_view step_line(JsonLine& line, const StepRecord& record) {
  line.begin("step", record.step);
  line.seconds("seconds", record.seconds);
  line.number("loss", record.loss);
  line.number("lr", record.lr);
  line.number("grad_norm", record.grad_norm);
  line.integer("items", record.items);
  line.number("items_per_second", record.items_per_second);
  put(line, "loss_scale", record.loss_scale);
  line.flag("skipped", record.skipped);
  if (record.skipped) {
    line.text("why", record.why);
    line.text("parameter", record.parameter);
  }
  put(line, "stalled_share", record.stalled_share);
  put(line, "saturated_share", record.saturated_share);
  put(line, "vanished_share", record.vanished_share);
  const std::pair<std::string_view, const std::string&> most[] = {{"stalled_most", record.stalled_most},
                                                                  {"saturated_most", record.saturated_most},
                                                                  {"vanished_most", record.vanished_most}};
  for (const auto& [key, name] : most)
    if (!name.empty()) line.text(key, name);
  put(line, "share_of_peak", record.share_of_peak);
  put(line, "evaluation_loss", record.evaluation_loss);
  if (!record.rank_losses.empty()) line.list("rank_losses", record.rank_losses);
  line.open("phases");
  line.seconds("forward", record.phases.forward);
  line.seconds("backward", record.phases.backward);
  line.seconds("inspect", record.phases.inspect);
  line.seconds("step", record.phases.step);
  line.seconds("data", record.phases.data);
  line.seconds("other", record.phases.other);
  line.close();
  if (record.memory) put(line, *record.memory);
  return line.end();
}

std::string_view step_row(std::string& row, const StepRecord& record) {
  row.clear();
  const auto number = [&](double value) { append_number(row += ',', value, ""); };
  const auto seconds = [&](double value) { append_seconds(row += ',', value, ""); };
  const auto integer = [&](int64_t value) { append_integer(row += ',', value); };
  const auto perhaps = [&](const std::optional<double>& value) {
    row += ',';
    if (value) append_number(row, *value, "");
  };
  append_integer(row, record.step);
  seconds(record.seconds);
  number(record.loss);
  number(record.lr);
  number(record.grad_norm);
  integer(record.items);
  number(record.items_per_second);
  perhaps(record.loss_scale);
  row += record.skipped ? ",1," : ",0,";
  if (record.skipped) append_csv_text(row, record.why);
  row += ',';
  if (record.skipped) append_csv_text(row, record.parameter);
  perhaps(record.stalled_share);
  perhaps(record.share_of_peak);
  perhaps(record.evaluation_loss);
  const PhaseSeconds& phases = record.phases;
  for (const double phase :
       {phases.forward, phases.backward, phases.inspect, phases.step, phases.data, phases.other})
    seconds(phase);
  if (record.memory) {
    integer(record.memory->live_bytes);
    integer(record.memory->peak_bytes);
  } else {
    row += ",,";
  }
  row += "\r\n";
  return row;
}

std::string_view evaluation_line(JsonLine& line, const EvaluationRecord& record) {
  line.begin("evaluation", record.step);
  line.seconds("seconds", record.seconds);
  line.number("loss", record.loss);
  put(line, "accuracy", record.accuracy);
  line.integer("items", record.items);
  line.seconds("duration_seconds", record.duration_seconds);
  return line.end();
}

std::string_view sample_line(JsonLine& line, const SampleRecord& record) {
  line.begin("sample", record.step);
  line.seconds("seconds", record.seconds);
  line.text("prompt", record.prompt);
  line.text("text", record.text);
  return line.end();
}

std::string_view note_line(JsonLine& line, int64_t step, double seconds, std::string_view text) {
  line.begin("note", step);
  line.seconds("seconds", seconds);
  line.text("text", text);
  return line.end();
}

std::string_view checkpoint_line(JsonLine& line, const CheckpointRecord& record) {
  line.begin("checkpoint", record.step);
  line.seconds("seconds", record.seconds);
  line.integer("saved_step", record.saved_step);
  line.integer("tensor_bytes", record.tensor_bytes);
  return line.end();
}

std::string_view probe_line(JsonLine& line, const ProbeRecord& record) {
  const TensorStats& stats = record.stats;
  int first = TensorStats::kLeastExponent, last = TensorStats::kLargestExponent;
  while (first < last && stats.in_binade(first) == 0) ++first;
  while (last >= first && stats.in_binade(last) == 0) --last;  // before the first, if there is none
  std::vector<int64_t> counts, fractions;
  for (int exponent = first; exponent <= last; ++exponent) {
    const FractionCounts& part = stats.fractions[static_cast<size_t>(exponent - TensorStats::kLeastExponent)];
    counts.push_back(stats.in_binade(exponent));
    for (const int64_t count :
         {part.powers_of_two, part.ones_1, part.ones_2, part.ones_3, part.ones_7, part.ones_10})
      fractions.push_back(count);
  }
  line.begin("probe", record.step);
  line.seconds("seconds", record.seconds);
  line.text("role", record.role);
  line.text("name", record.name);
  line.integer("count", stats.count);
  line.integer("zeros", stats.zeros);
  line.integer("nans", stats.nans);
  line.integer("infinities", stats.infinities);
  line.number("sum", stats.sum);
  line.number("amax", static_cast<double>(stats.amax));
  line.integer("first_exponent", first);
  line.list("exponents", counts);
  line.list("fractions", fractions);
  line.list("saturated", stats.saturated);
  if (record.summed_parts > 1) {
    line.integer("summed_parts", record.summed_parts);
    line.text("sum_type", record.sum_type);
  }
  return line.end();
}

std::string_view shadow_line(JsonLine& line, const ShadowRecord& record) {
  line.begin("shadow", record.step);
  line.seconds("seconds", record.seconds);
  line.text("precision", record.precision);
  line.text("layer", record.layer);
  line.number("output_error", record.output_error);
  line.number("input_grad_error", record.input_grad_error);
  line.number("weight_grad_error", record.weight_grad_error);
  line.number("forward_noise", record.forward_noise);
  line.number("backward_noise", record.backward_noise);
  line.number("gradient_share", record.gradient_share);
  return line.end();
}

std::string_view culprit_line(JsonLine& line, const CulpritRecord& record) {
  line.begin("culprit", record.step);
  line.seconds("seconds", record.seconds);
  line.integer("rank", record.rank);
  line.list("ranks", record.ranks);
  line.text("op", record.op);
  line.text("inside", record.inside);
  line.text("layer", record.layer);
  line.text("direction", record.direction);
  line.list("inputs", record.inputs);
  line.text("output", record.output);
  line.flag("precision_is_cause", record.precision_is_cause);
  line.text("verdict", record.verdict);
  line.integer("propagated", record.propagated);
  return line.end();
}

std::string_view finding_line(JsonLine& line, const FindingRecord& record) {
  const Finding& finding = record.finding;
  line.begin("finding", record.step);
  line.seconds("seconds", record.seconds);
  line.text("code", finding.code);
  line.text("severity", to_string(finding.severity));
  line.integer("began", finding.step);
  line.text("what", finding.what);
  line.text("evidence", finding.evidence);
  line.text("remedy", finding.remedy);
  if (!finding.layer.empty()) line.text("layer", finding.layer);
  if (!finding.op.empty()) line.text("op", finding.op);
  return line.end();
}

std::string_view end_line(JsonLine& line, int64_t step, double seconds, std::string_view outcome,
                          std::string_view why) {
  line.begin("end", step);
  line.seconds("seconds", seconds);
  line.text("outcome", outcome);
  line.text("why", why);
  return line.end();
}

}  // namespace halfstep::log
