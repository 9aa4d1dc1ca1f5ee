// The fields of one config.json, each asked for by name, kind and range. What nobody asked for is the rest.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace halfstep::models {

/// No size in a config may exceed it: the product of any two, in bytes, fits 63 bits.
inline constexpr int64_t kLargestSize = int64_t{1} << 27;
inline constexpr int64_t kMostLayers = 4096;

/// A field that is absent or null leaves the value as it is: the default.
class ConfigFields {
 public:
  ConfigFields(nlohmann::json fields, std::string where);

  void take(const char* name, int64_t& value);
  void take(const char* name, std::optional<int64_t>& value);
  void take(const char* name, double& value);
  void take(const char* name, bool& value);
  void take(const char* name, std::string& value);

  /// The field, or null.
  nlohmann::json take(const char* name);

  /// Throws for a field that is there and not null, false or `harmless`: it would change what the model
  /// computes. `why` ends the Error.
  void refuse(const char* name, const char* why, const nlohmann::json& harmless = nullptr);

  /// What has not been taken.
  const nlohmann::json& rest() const { return fields_; }
  const std::string& where() const { return where_; }

 private:
  nlohmann::json fields_;
  std::string where_;
};

}  // namespace halfstep::models
