#include <halfstep/printable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>

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

struct Character {
  uint32_t value = 0;
  size_t bytes = 0;  // 0: not UTF-8
};

Character character_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[at + index]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || at + bytes > text.size()) return {};
  uint32_t value = first & (0x7Fu >> bytes);
  for (size_t index = 1; index < bytes; ++index) {
    if ((byte(index) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(index) & 0x3Fu);
  }
  constexpr std::array<uint32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < kLeast[bytes] || value > 0x10FFFF || surrogate) return {};
  return {value, bytes};
}

void append_stand_in(std::string& result, Unprintable unprintable, Character character, char byte) {
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
    const Character next = character_at(text, at);
    if (next.bytes == 0 || is_control(next.value))
      append_stand_in(result, unprintable, next, text[at]);
    else
      result += text.substr(at, next.bytes);
    at += std::max<size_t>(next.bytes, 1);
  }
  return result;
}

}  // namespace halfstep
