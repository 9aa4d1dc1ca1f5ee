#include "report/fields.h"

#include <halfstep/printable.h>

#include <limits>

#include "report/figures.h"

namespace halfstep::report {

using nlohmann::json;
using Field = RecordReader::Field;

namespace {

constexpr size_t kMostFields = 100'000, kMostNesting = 16;

[[noreturn]] void refuse(std::string_view name, const char* wanted) {
  throw BadRecord(detail::concat("has a '", name, "' that is not ", wanted, "."));
}

}  // namespace

const std::vector<Field>& RecordReader::read(std::string_view line) {
  // nlohmann 3.11 takes a NUL for the end of the text.
  if (line.find('\0') != std::string_view::npos) throw BadRecord("has a NUL byte.");
  if (fields_.empty()) fields_.emplace_back();
  fields_.front() = {.within = std::numeric_limits<size_t>::max(), .value = Other{}};
  count_ = 1;
  open_.clear();
  arrays_ = 0;
  json::sax_parse(line, static_cast<nlohmann::json_sax<json>*>(this));
  if (!std::holds_alternative<Object>(fields_.front().value)) throw BadRecord("is no object of JSON.");
  return fields_;
}

template <typename Value>
bool RecordReader::put(Value&& value) {
  if (arrays_ == 0) fields_[count_ - 1].value = std::forward<Value>(value);
  return true;
}

bool RecordReader::number_unsigned(number_unsigned_t value) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    return put(static_cast<int64_t>(value));
  return put(static_cast<double>(value));
}

bool RecordReader::start_object(size_t) {
  if (arrays_ > 0) return true;
  put(Object{});
  open_.push_back(count_ - 1);
  if (open_.size() > kMostNesting) throw BadRecord("is nested too deeply for a record.");
  return true;
}

bool RecordReader::end_object() {
  if (arrays_ == 0) open_.pop_back();
  return true;
}

bool RecordReader::start_array(size_t) {
  put(Other{});
  ++arrays_;
  return true;
}

bool RecordReader::end_array() {
  --arrays_;
  return true;
}

bool RecordReader::key(string_t& name) {
  if (arrays_ > 0) return true;
  if (count_ == kMostFields) throw BadRecord("has too many fields for a record.");
  if (fields_.size() == count_) fields_.emplace_back();
  Field& field = fields_[count_++];
  field.name.swap(name);
  field.within = open_.back();
  return true;
}

bool RecordReader::parse_error(size_t, const std::string&, const json::exception& fault) {
  // The message repeats the token at fault, however long it is.
  throw BadRecord(detail::concat(
      "is not valid JSON: ", printable(std::string_view(fault.what()).substr(0, 300), Unprintable::Escaped)));
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

double Fields::number(std::string_view name) const {
  const auto& value = at(name).value;
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (const auto* word = std::get_if<std::string>(&value)) {
    if (*word == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (*word == "Infinity") return kInfinity;
    if (*word == "-Infinity") return -kInfinity;
  }
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

std::vector<std::string_view> Fields::names() const {
  std::vector<std::string_view> names;
  for (size_t i = object_ + 1; i < count_; ++i)
    if (all_[i].within == object_) names.emplace_back(all_[i].name);
  return names;
}

}  // namespace halfstep::report
