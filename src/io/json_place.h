// Typed reading of JSON from untrusted files: every refusal names the file and the path to the value.
#pragma once

#include <halfstep/error.h>
#include <halfstep/printable.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "words/names.h"

namespace halfstep::files {

/// A value and where it stands: "tokenizer.json: added_tokens[7].id: ...". Refers to the value: the JSON must
/// outlive it.
class JsonPlace {
 public:
  JsonPlace(const nlohmann::json& value, std::string where, bool inside = false)
      : value_(value), where_(std::move(where)), inside_(inside) {}

  const std::string& where() const { return where_; }
  const nlohmann::json& value() const { return value_; }
  bool is_null() const { return value_.is_null(); }
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }

  /// A key that is absent reads as null.
  JsonPlace at(const char* key) const {
    static const nlohmann::json null;
    return {has(key) ? value_.at(key) : null, path_to(key), true};
  }
  const std::string& text() const {
    expect(value_.is_string(), "a string");
    return value_.get_ref<const std::string&>();
  }
  bool truth() const {
    expect(value_.is_boolean(), "true or false");
    return value_.get<bool>();
  }
  bool truth(bool absent) const { return is_null() ? absent : truth(); }
  int64_t integer() const {
    expect(value_.is_number_integer() && (!value_.is_number_unsigned() || value_.get<uint64_t>() >> 63 == 0),
           "a whole number of 64 bits");
    return value_.get<int64_t>();
  }
  int64_t count() const {
    const int64_t number = integer();
    expect(number >= 0, "a count");
    return number;
  }
  /// A whole number from 1 to `most`.
  int64_t size(int64_t most) const {
    expect(value_.is_number_integer(), "a whole number");
    // An unsigned number beyond 63 bits becomes negative.
    const int64_t number = value_.get<int64_t>();
    HALFSTEP_CHECK(number >= 1 && number <= most, where_, ": is ", shown(), ", expected 1 to ", most, ".");
    return number;
  }
  /// A finite number that is not negative.
  double number() const {
    expect(value_.is_number(), "a number");
    const double number = value_.get<double>();
    expect(std::isfinite(number) && number >= 0, "a finite number that is not negative");
    return number;
  }
  std::vector<JsonPlace> elements() const {
    expect(value_.is_array(), "an array");
    std::vector<JsonPlace> all;
    for (const nlohmann::json& element : value_)
      all.emplace_back(element, where_ + "[" + std::to_string(all.size()) + "]", true);
    return all;
  }
  std::vector<std::pair<std::string, JsonPlace>> fields() const {
    expect_object();
    std::vector<std::pair<std::string, JsonPlace>> all;
    for (const auto& [key, value] : value_.items())
      all.emplace_back(key, JsonPlace(value, path_to(in_quotes(key)), true));
    return all;
  }

  void expect_object() const { expect(value_.is_object(), "an object"); }
  /// All of `required`, perhaps some of `optional`, and no other key.
  void expect_fields(std::initializer_list<std::string_view> required,
                     std::initializer_list<std::string_view> optional = {}) const {
    expect_object();
    for (const std::string_view key : required)
      HALFSTEP_CHECK(value_.contains(key), where_, ": has no '", key, "'.");
    for (const auto& [key, unused] : value_.items())
      HALFSTEP_CHECK(std::ranges::find(required, key) != required.end() ||
                         std::ranges::find(optional, key) != optional.end(),
                     where_, ": the key ", in_quotes(key), " is not known to this Halfstep.");
  }
  /// A key that is not listed is refused: ignoring it could change the result.
  void expect_keys(std::initializer_list<std::string_view> known) const { expect_fields({}, known); }
  void expect_false(const char* key) const {
    HALFSTEP_CHECK(!at(key).truth(false), path_to(key), ": true is not known to this Halfstep.");
  }
  void expect_nothing(const char* key) const {
    const nlohmann::json& value = at(key).value();
    HALFSTEP_CHECK(value.is_null() || value == "" || value == 0, path_to(key), ": ", in_quotes(value.dump()),
                   " is not known to this Halfstep; null is.");
  }
  void expect(bool holds, std::string_view what) const {
    HALFSTEP_CHECK(holds, where_, ": is ", shown(), ", expected ", what, ".");
  }
  [[noreturn]] void refuse_type(std::string_view known) const {
    detail::throw_error(detail::concat(where_, ": the type ", in_quotes(at("type").text()),
                                       " is not known to this Halfstep. Known: ", known, "."));
  }
  /// The value as JSON, its first 80 bytes.
  std::string shown() const {
    constexpr size_t kMostBytes = 80;
    if (value_.is_structured()) return value_.type_name();
    return printable(beginning_of(value_.dump(), kMostBytes), Unprintable::Escaped);
  }

 private:
  std::string path_to(std::string_view key) const { return (where_ + (inside_ ? "." : ": ")).append(key); }

  const nlohmann::json& value_;
  std::string where_;
  bool inside_;  // a file; else the file itself
};

/// Reads the fields of one object into variables. A field that is absent or null leaves its variable as it
/// is: the default. `rest()` is what was not read.
class JsonFields {
 public:
  /// Sizes are whole numbers from 1 to `largest_size`.
  JsonFields(JsonPlace object, int64_t largest_size)
      : object_(std::move(object)), largest_size_(largest_size) {
    object_.expect_object();
  }

  JsonPlace read(const char* key) {
    read_.insert(key);
    return object_.at(key);
  }
  void read(const char* key, int64_t& size) {
    if (const JsonPlace field = read(key); !field.is_null()) size = field.size(largest_size_);
  }
  void read(const char* key, std::optional<int64_t>& size) {
    if (const JsonPlace field = read(key); !field.is_null()) size = field.size(largest_size_);
  }
  void read(const char* key, double& number) {
    if (const JsonPlace field = read(key); !field.is_null()) number = field.number();
  }
  void read(const char* key, bool& truth) {
    if (const JsonPlace field = read(key); !field.is_null()) truth = field.truth();
  }
  void read(const char* key, std::string& text) {
    if (const JsonPlace field = read(key); !field.is_null()) text = field.text();
  }

  /// Throws for a field that is there and not null, false or `harmless`: it would change the result. `why`
  /// ends the Error.
  void refuse(const char* key, std::string_view why, const nlohmann::json& harmless = nullptr) const {
    const JsonPlace field = object_.at(key);
    if (field.is_null() || field.value() == false || field.value() == harmless) return;
    detail::throw_error(detail::concat(field.where(), ": is ", field.shown(), ": ", why));
  }

  const std::string& where() const { return object_.where(); }
  /// There, and null.
  bool is_null(const char* key) const { return object_.has(key) && object_.at(key).is_null(); }
  nlohmann::json rest() const {
    nlohmann::json left = nlohmann::json::object();
    for (const auto& [key, value] : object_.value().items())
      if (!read_.contains(key)) left[key] = value;
    return left;
  }

 private:
  JsonPlace object_;
  int64_t largest_size_;
  std::set<std::string, std::less<>> read_;
};

}  // namespace halfstep::files
