#include "models/config_fields.h"

#include <halfstep/error.h>
#include <halfstep/printable.h>

#include <cmath>

#include "words/names.h"

namespace halfstep::models {
namespace {

// A value of any length from a file of others.
std::string shown(const nlohmann::json& field) {
  constexpr size_t kMostBytes = 80;
  return printable(beginning_of(field.dump(), kMostBytes), Unprintable::Escaped);
}

}  // namespace

ConfigFields::ConfigFields(nlohmann::json fields, std::string where)
    : fields_(std::move(fields)), where_(std::move(where)) {
  HALFSTEP_CHECK(fields_.is_object(), where_, ": holds ", fields_.type_name(), ", expected an object.");
}

nlohmann::json ConfigFields::take(const char* name) {
  const auto found = fields_.find(name);
  if (found == fields_.end()) return nullptr;
  nlohmann::json value = std::move(*found);
  fields_.erase(found);
  return value;
}

void ConfigFields::take(const char* name, int64_t& value) {
  const auto field = take(name);
  if (field.is_null()) return;
  HALFSTEP_CHECK(field.is_number_integer(), where_, ": '", name, "' is ", shown(field),
                 ", expected a whole number.");
  const bool fits = field.is_number_unsigned() ? field.get<uint64_t>() <= uint64_t{kLargestSize}
                                               : field.get<int64_t>() >= 1;
  HALFSTEP_CHECK(fits && field.get<int64_t>() >= 1, where_, ": '", name, "' is ", shown(field),
                 ", expected 1 to ", kLargestSize, ".");
  value = field.get<int64_t>();
}

void ConfigFields::take(const char* name, std::optional<int64_t>& value) {
  int64_t given = 0;
  take(name, given);
  if (given != 0) value = given;
}

void ConfigFields::take(const char* name, double& value) {
  const auto field = take(name);
  if (field.is_null()) return;
  HALFSTEP_CHECK(field.is_number(), where_, ": '", name, "' is ", shown(field), ", expected a number.");
  value = field.get<double>();
  HALFSTEP_CHECK(std::isfinite(value) && value >= 0, where_, ": '", name, "' is ", shown(field),
                 ", expected a finite number that is not negative.");
}

void ConfigFields::take(const char* name, bool& value) {
  const auto field = take(name);
  if (field.is_null()) return;
  HALFSTEP_CHECK(field.is_boolean(), where_, ": '", name, "' is ", shown(field), ", expected true or false.");
  value = field.get<bool>();
}

void ConfigFields::take(const char* name, std::string& value) {
  const auto field = take(name);
  if (field.is_null()) return;
  HALFSTEP_CHECK(field.is_string(), where_, ": '", name, "' is ", shown(field), ", expected a text.");
  value = field.get<std::string>();
}

void ConfigFields::refuse(const char* name, const char* why, const nlohmann::json& harmless) {
  const auto found = fields_.find(name);
  if (found == fields_.end() || found->is_null() || *found == false || *found == harmless) return;
  throw Error(detail::concat(where_, ": '", name, "' is ", shown(*found), ": ", why));
}

}  // namespace halfstep::models
