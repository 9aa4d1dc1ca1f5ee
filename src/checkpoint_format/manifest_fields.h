// The fields of one JSON object in a manifest, each asked for by name and kind.
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint_format/manifest.h"

namespace halfstep::files {

/// Refuses an object that lacks a required name or has one that is neither required nor optional.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string where, std::initializer_list<std::string_view> required,
         std::initializer_list<std::string_view> optional = {});

  bool has(const char* name) const { return object_.contains(name); }
  const std::string& text(const char* name) const;
  int64_t count(const char* name) const;  ///< a whole number, not negative
  std::vector<int64_t> counts(const char* name) const;
  Sha256Text sha256(const char* name) const;
  const nlohmann::json& object(const char* name) const;
  const nlohmann::json& array(const char* name) const;
  const std::string& where() const { return where_; }

 private:
  const nlohmann::json& object_;
  std::string where_;
};

/// A number that fits in 64 signed bits: no fraction, no exponent.
int64_t whole_number(const nlohmann::json& value, std::string_view where);

/// The type of that name; an Error for an unknown one.
TensorType tensor_type(std::string_view name, std::string_view where);

/// That type, shape, strides and byte range of a tensor agree, without overflow.
void check_extent(const ManifestTensor& tensor, std::string_view where);

}  // namespace halfstep::files
