// A value in a stranger's JSON, and the way to it.
#pragma once

#include <halfstep/error.h>

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "words/names.h"

namespace halfstep::text {

/// Knows where it stands, so that every refusal does: "tokenizer.json: added_tokens[7].id: ...".
class Place {
 public:
  Place(const nlohmann::json& value, std::string where, bool inside = false)
      : value_(value), where_(std::move(where)), inside_(inside) {}

  const std::string& where() const { return where_; }
  bool is_null() const { return value_.is_null(); }

  /// A key that is not named here is refused: ignoring it could change the tokens.
  void expect_keys(std::initializer_list<std::string_view> known) const {
    HALFSTEP_CHECK(value_.is_object(), where_, ": is ", value_.type_name(), ", expected an object.");
    for (const auto& [key, unused] : value_.items())
      HALFSTEP_CHECK(std::ranges::find(known, key) != known.end(), where_, ": the key ", in_quotes(key),
                     " is not known to this Halfstep.");
  }
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  Place at(const char* key) const {
    static const nlohmann::json null;
    return {has(key) ? value_.at(key) : null, way_to(key), true};
  }
  const std::string& text() const {
    HALFSTEP_CHECK(value_.is_string(), where_, ": is ", value_.type_name(), ", expected a string.");
    return value_.get_ref<const std::string&>();
  }
  bool truth(bool absent) const { return value_.is_null() ? absent : truth(); }
  bool truth() const {
    HALFSTEP_CHECK(value_.is_boolean(), where_, ": is ", value_.type_name(), ", expected true or false.");
    return value_.get<bool>();
  }
  int64_t integer() const {
    HALFSTEP_CHECK(
        value_.is_number_integer() && (!value_.is_number_unsigned() || value_.get<uint64_t>() >> 63 == 0),
        where_, ": ", value_.type_name(), " is not a whole number of 64 bits.");
    return value_.get<int64_t>();
  }
  std::vector<Place> elements() const {
    HALFSTEP_CHECK(value_.is_array(), where_, ": is ", value_.type_name(), ", expected an array.");
    std::vector<Place> all;
    for (const nlohmann::json& element : value_)
      all.emplace_back(element, where_ + "[" + std::to_string(all.size()) + "]", true);
    return all;
  }
  const nlohmann::json& value() const { return value_; }

  void expect_false(const char* key) const {
    HALFSTEP_CHECK(!at(key).truth(false), way_to(key), ": true is not known to this Halfstep.");
  }
  void expect_nothing(const char* key) const {
    const nlohmann::json& value = at(key).value();
    HALFSTEP_CHECK(value.is_null() || value == "" || value == 0, way_to(key), ": ", in_quotes(value.dump()),
                   " is not known to this Halfstep; null is.");
  }
  [[noreturn]] void refuse_type(std::string_view known) const {
    detail::throw_error(detail::concat(where_, ": the type ", in_quotes(at("type").text()),
                                       " is not known to this Halfstep. Known: ", known, "."));
  }

 private:
  std::string way_to(std::string_view key) const { return (where_ + (inside_ ? "." : ": ")).append(key); }

  const nlohmann::json& value_;
  std::string where_;
  bool inside_;  // a file; else the file itself
};

}  // namespace halfstep::text
