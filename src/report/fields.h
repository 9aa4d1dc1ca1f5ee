// The fields of one record of a log, by name and type.
#pragma once

#include <halfstep/error.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace halfstep::report {

/// What a log may hold that this reader cannot use: told with file and line by whoever knows them.
class BadRecord : public Error {
 public:
  using Error::Error;
};

/// Fields that nobody asks for are left alone: later versions may add some.
class Fields {
 public:
  explicit Fields(const nlohmann::json& record);

  int64_t integer(const char* name) const;
  /// A number, or one of the words for those that JSON has not.
  double number(const char* name) const;
  bool flag(const char* name) const;
  std::string text(const char* name) const;
  Fields within(const char* name) const;

  bool has(const char* name) const { return record_.contains(name); }
  std::optional<double> perhaps(const char* name) const;

  const nlohmann::json& all() const { return record_; }

 private:
  const nlohmann::json& at(const char* name) const;

  const nlohmann::json& record_;
};

}  // namespace halfstep::report
