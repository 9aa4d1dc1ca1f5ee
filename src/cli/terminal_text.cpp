#include "cli/terminal_text.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace halfstep::cli {
namespace {

struct Range {
  uint32_t first, last;
};

// Blocks, not single characters: a mark within a wide block that is narrow costs a column of a line, no more.
constexpr std::array<Range, 17> kWide{{{0x1100, 0x115F},
                                       {0x231A, 0x231B},
                                       {0x23E9, 0x23EC},
                                       {0x2614, 0x2615},
                                       {0x26A1, 0x26A1},
                                       {0x2705, 0x2705},
                                       {0x2728, 0x2728},
                                       {0x274C, 0x274C},
                                       {0x2B50, 0x2B50},
                                       {0x2E80, 0x303E},
                                       {0x3041, 0xA4CF},
                                       {0xA960, 0xA97C},
                                       {0xAC00, 0xD7A3},
                                       {0xF900, 0xFAFF},
                                       {0xFE30, 0xFE6F},
                                       {0xFF01, 0xFF60},
                                       {0x1F000, 0x3FFFD}}};
constexpr std::array<Range, 12> kCombining{{{0x0300, 0x036F},
                                            {0x0483, 0x0489},
                                            {0x0591, 0x05BD},
                                            {0x0610, 0x061A},
                                            {0x064B, 0x065F},
                                            {0x093A, 0x094D},
                                            {0x1AB0, 0x1AFF},
                                            {0x1DC0, 0x1DFF},
                                            {0x200B, 0x200D},
                                            {0x20D0, 0x20FF},
                                            {0xFE00, 0xFE0F},
                                            {0xFE20, 0xFE2F}}};
template <size_t N>
bool among(const std::array<Range, N>& ranges, uint32_t value) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [&](Range range) { return value >= range.first && value <= range.last; });
}

struct Character {
  uint32_t value;
  size_t bytes;
};

// Of printable text, which is UTF-8.
Character character_at(std::string_view text, size_t at) {
  const auto first = static_cast<uint8_t>(text[at]);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  uint32_t value = first & (0x7Fu >> bytes);
  for (const char next : text.substr(at + 1, bytes - 1))
    value = value << 6 | (static_cast<uint8_t>(next) & 0x3Fu);
  return {value, bytes};
}

size_t columns_of(uint32_t value) { return among(kCombining, value) ? 0 : among(kWide, value) ? 2 : 1; }

// How many bytes of `text` fit into so many columns; at least one character, so that every line moves on.
size_t bytes_that_fit(std::string_view text, size_t columns) {
  size_t at = 0, taken = 0;
  while (at < text.size()) {
    const Character next = character_at(text, at);
    taken += columns_of(next.value);
    if (taken > columns && at > 0) break;
    at += next.bytes;
  }
  return at;
}

}  // namespace

size_t columns_of(std::string_view printable_text) {
  size_t columns = 0;
  for (size_t at = 0; at < printable_text.size();) {
    const Character next = character_at(printable_text, at);
    columns += columns_of(next.value);
    at += next.bytes;
  }
  return columns;
}

std::vector<std::string> wrapped(std::string_view printable_text, size_t columns, size_t indent) {
  std::vector<std::string> lines;
  do {
    const size_t margin = lines.empty() || indent + 1 >= columns ? 0 : indent;
    size_t bytes = bytes_that_fit(printable_text, columns - margin);
    if (bytes < printable_text.size() && printable_text[bytes] != ' ') {
      const size_t space = printable_text.rfind(' ', bytes);
      if (space != std::string_view::npos && space > 0) bytes = space;
    }
    lines.push_back(std::string(margin, ' ').append(printable_text.substr(0, bytes)));
    printable_text.remove_prefix(bytes);
    printable_text.remove_prefix(std::min(printable_text.find_first_not_of(' '), printable_text.size()));
  } while (!printable_text.empty());
  return lines;
}

}  // namespace halfstep::cli
