// safetensors files made by hand, to be wrong in one place.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace halfstep::testing {

/// A file of that header and so many bytes of data, each 1.
inline std::string file_of(std::string_view header, size_t data_bytes = 0) {
  const uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header).append(data_bytes, '\1');
}

/// "name":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}
inline std::string entry(std::string_view name, std::string_view type, std::string_view shape,
                         std::string_view offsets) {
  return '"' + std::string(name) + R"(":{"dtype":")" + std::string(type) + R"(","shape":)" +
         std::string(shape) + R"(,"data_offsets":)" + std::string(offsets) + "}";
}

/// A file of one tensor 'a'.
inline std::string one(std::string_view type, std::string_view shape, std::string_view offsets,
                       size_t data_bytes = 1) {
  return file_of(std::string("{") + entry("a", type, shape, offsets) + "}", data_bytes);
}

/// A file of one good tensor, 'a', under a name as it stands in JSON.
inline std::string named(std::string_view name) {
  return file_of(std::string("{") + entry(name, "U8", "[1]", "[0,1]") + "}", 1);
}

inline std::string repeated(std::string_view text, size_t times) {
  std::string result;
  result.reserve(text.size() * times);
  for (size_t i = 0; i < times; ++i) result += text;
  return result;
}

}  // namespace halfstep::testing
