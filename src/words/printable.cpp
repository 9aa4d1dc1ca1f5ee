#include <halfstep/printable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>

#include "words/names.h"
#include "words/utf8.h"

namespace halfstep {
namespace {

struct Range {
  uint32_t first, last;
};

// C0 and C1 controls, line and paragraph separators, the signs that turn the direction of writing.
constexpr std::array<Range, 7> kControls{{{0x00, 0x1F},
                                          {0x7F, 0x9F},
                                          {0x061C, 0x061C},
                                          {0x200E, 0x200F},
                                          {0x2028, 0x202E},
                                          {0x2060, 0x206F},
                                          {0xFEFF, 0xFEFF}}};

bool is_control(uint32_t value) {
  return std::ranges::any_of(kControls,
                             [&](Range range) { return value >= range.first && value <= range.last; });
}

void append_stand_in(std::string& result, Unprintable unprintable, CodePoint character, char byte) {
  if (unprintable == Unprintable::Replaced) {
    result += character.value == '\n' || character.value == '\t' ? " " : "\uFFFD";
    return;
  }
  const bool one_byte = character.bytes < 2;
  char digits[16];
  std::snprintf(digits, sizeof digits, one_byte ? "\\x%02x" : "\\u%04x",
                one_byte ? static_cast<uint8_t>(byte) : character.value);
  result += digits;
}

}  // namespace

std::string printable(std::string_view text, Unprintable unprintable) {
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint next = code_point_at(text, at);
    if (next.bytes == 0 || is_control(next.value))
      append_stand_in(result, unprintable, next, text[at]);
    else
      result += text.substr(at, next.bytes);
    at += std::max(next.bytes, 1u);
  }
  return result;
}

std::string printable_json(std::string_view json) {
  std::string result;
  for (size_t at = 0; at < json.size();) {
    const CodePoint next = code_point_at(json, at);
    const uint32_t bytes = std::max(next.bytes, 1u);
    // Controls stand within texts alone, and those below 0x20 are escaped there already: a line end is ours.
    if (next.bytes == 0 || (is_control(next.value) && next.value != '\n'))
      append_stand_in(result, Unprintable::Escaped, {next.value, 2, false}, json[at]);
    else
      result += json.substr(at, bytes);
    at += bytes;
  }
  return result;
}

}  // namespace halfstep
