// Code points in a string of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace halfstep {

struct CodePoint {
  uint32_t value = 0;
  uint32_t bytes = 0;      ///< 0: no valid code point begins here
  bool cut_short = false;  ///< more bytes behind the end of the text could make it valid
};

/// The code point that begins at `at`, by the Unicode standard's table 3-7: no overlong form, no surrogate.
CodePoint code_point_at(std::string_view text, size_t at);

/// How many bytes of `text`, from `at` on, are valid UTF-8.
size_t valid_bytes_from(std::string_view text, size_t at);

/// With U+FFFD for each byte that belongs to no valid code point.
std::string valid_utf8(std::string_view text);

void append_utf8(uint32_t code_point, std::string& text);

}  // namespace halfstep
