#include "report/fields.h"

#include <limits>

#include "files/in_quotes.h"

namespace halfstep::report {

using nlohmann::json;

namespace {

[[noreturn]] void refuse(const char* name, const char* wanted, const json& value) {
  throw BadRecord(detail::concat("'", name, "' is ",
                                 files::in_quotes(value.dump(-1, ' ', false, json::error_handler_t::replace)),
                                 ", expected ", wanted, "."));
}

}  // namespace

Fields::Fields(const json& record) : record_(record) {
  if (!record.is_object()) throw BadRecord("is no object of JSON.");
}

const json& Fields::at(const char* name) const {
  const auto field = record_.find(name);
  if (field == record_.end()) throw BadRecord(detail::concat("has no '", name, "'."));
  return *field;
}

int64_t Fields::integer(const char* name) const {
  const json& value = at(name);
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{1} << 62);
  if (!fits || value.get<int64_t>() < 0) refuse(name, "a whole number from 0 on", value);
  return value.get<int64_t>();
}

double Fields::number(const char* name) const {
  const json& value = at(name);
  if (value.is_number()) return value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return kInfinity;
  if (value == "-Infinity") return -kInfinity;
  refuse(name, "a number, \"NaN\", \"Infinity\" or \"-Infinity\"", value);
}

bool Fields::flag(const char* name) const {
  const json& value = at(name);
  if (!value.is_boolean()) refuse(name, "true or false", value);
  return value.get<bool>();
}

std::string Fields::text(const char* name) const {
  const json& value = at(name);
  if (!value.is_string()) refuse(name, "a text", value);
  return value.get<std::string>();
}

Fields Fields::within(const char* name) const {
  const json& value = at(name);
  if (!value.is_object()) refuse(name, "an object", value);
  return Fields(value);
}

std::optional<double> Fields::perhaps(const char* name) const {
  if (!has(name)) return {};
  return number(name);
}

}  // namespace halfstep::report
