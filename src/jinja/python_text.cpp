#include "jinja/python_text.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "jinja/case_ranges.h"
#include "words/utf8.h"

namespace halfstep::python {
namespace {

struct Range {
  uint32_t first, last;
};

bool within(uint32_t code_point, const auto& ranges) {
  return std::ranges::any_of(
      ranges, [&](const Range& range) { return code_point >= range.first && code_point <= range.last; });
}

// Controls, formats, separators and private use: Unicode's Cc, Cf, Z and Co outside ASCII.
constexpr std::array<Range, 27> kUnprintable{
    {{0x80, 0xA0},       {0xAD, 0xAD},        {0x600, 0x605},     {0x61C, 0x61C},     {0x6DD, 0x6DD},
     {0x70F, 0x70F},     {0x890, 0x891},      {0x8E2, 0x8E2},     {0x1680, 0x1680},   {0x180E, 0x180E},
     {0x2000, 0x200F},   {0x2028, 0x202F},    {0x205F, 0x2064},   {0x2066, 0x206F},   {0x3000, 0x3000},
     {0xE000, 0xF8FF},   {0xFEFF, 0xFEFF},    {0xFFF9, 0xFFFB},   {0x110BD, 0x110BD}, {0x110CD, 0x110CD},
     {0x13430, 0x13438}, {0x1BCA0, 0x1BCA3},  {0x1D173, 0x1D17A}, {0xE0001, 0xE0001}, {0xE0020, 0xE007F},
     {0xF0000, 0xFFFFD}, {0x100000, 0x10FFFD}}};

constexpr uint32_t kNoCodePoint = ~0u;  // a byte that is not UTF-8

struct Character {
  uint32_t value;
  size_t bytes;
};

Character character_at(std::string_view text, size_t at) {
  const CodePoint point = code_point_at(text, at);
  return point.bytes == 0 ? Character{kNoCodePoint, 1} : Character{point.value, point.bytes};
}

// Where the last character begins. `text` is not empty.
size_t last_character(std::string_view text) {
  for (size_t bytes = std::min<size_t>(text.size(), 4); bytes > 1; --bytes)
    if (character_at(text, text.size() - bytes).bytes == bytes) return text.size() - bytes;
  return text.size() - 1;
}

std::string_view lstrip_if(std::string_view text, auto&& strips) {
  while (!text.empty()) {
    const size_t bytes = character_at(text, 0).bytes;
    if (!strips(text.substr(0, bytes))) break;
    text.remove_prefix(bytes);
  }
  return text;
}

std::string_view rstrip_if(std::string_view text, auto&& strips) {
  while (!text.empty()) {
    const size_t begin = last_character(text);
    if (!strips(text.substr(begin))) break;
    text = text.substr(0, begin);
  }
  return text;
}

bool is_space_character(std::string_view character) { return is_space(character_at(character, 0).value); }

// A test of membership that does not grow with the set.
auto is_of(std::string_view set) {
  std::vector<std::string_view> members = characters(set);
  std::ranges::sort(members);
  return [members = std::move(members)](std::string_view one) {
    return std::ranges::binary_search(members, one);
  };
}

// Changes the case of one character outside ASCII by the tables; false if they have nothing.
bool append_changed(uint32_t value, const auto& ranges, const auto& texts, std::string& result) {
  const auto range = std::ranges::lower_bound(ranges, value, {}, &CaseRange::last);
  if (range != std::end(ranges) && value >= range->first && (value - range->first) % range->step == 0) {
    append_utf8(static_cast<uint32_t>(static_cast<int32_t>(value) + range->shift), result);
    return true;
  }
  const auto text = std::ranges::find(texts, value, &CaseText::code_point);
  if (text == std::end(texts)) return false;
  result += text->text;
  return true;
}

bool is_upper(uint32_t c) { return c >= 'A' && c <= 'Z'; }
bool is_lower(uint32_t c) { return c >= 'a' && c <= 'z'; }

void append_upper(std::string_view character, std::string& result) {
  const uint32_t value = character_at(character, 0).value;
  if (is_lower(value))
    result += static_cast<char>(value - 'a' + 'A');
  else if (value < 0x80 || value == kNoCodePoint || !append_changed(value, kUpper, kUpperTexts, result))
    result += character;
}

void append_lower(std::string_view character, std::string& result) {
  const uint32_t value = character_at(character, 0).value;
  if (is_upper(value))
    result += static_cast<char>(value - 'A' + 'a');
  else if (value < 0x80 || value == kNoCodePoint || !append_changed(value, kLower, kLowerTexts, result))
    result += character;
}

void append_title(std::string_view character, std::string& result) {
  const uint32_t value = character_at(character, 0).value;
  if (value < 0x80 || value == kNoCodePoint || !append_changed(value, kTitle, kTitleTexts, result))
    append_upper(character, result);
}

bool has_capital_sigma(std::string_view text) { return text.find("\u03A3") != text.npos; }

bool is_line_end(uint32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

// By bytes: to search from the end in linear time.
std::string reversed(std::string_view text) { return {text.rbegin(), text.rend()}; }

std::vector<std::string_view> split_at_space(std::string_view text, int64_t most) {
  std::vector<std::string_view> parts;
  while (!(text = lstrip(text)).empty()) {
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(rstrip(text));
      break;
    }
    size_t end = 0;
    while (end < text.size()) {
      const Character next = character_at(text, end);
      if (is_space(next.value)) break;
      end += next.bytes;
    }
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return parts;
}

std::vector<std::string_view> rsplit_at_space(std::string_view text, int64_t most) {
  std::vector<std::string_view> parts;
  while (!(text = rstrip(text)).empty()) {
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(lstrip(text));
      break;
    }
    const std::string_view left =
        rstrip_if(text, [](std::string_view one) { return !is_space_character(one); });
    parts.push_back(text.substr(left.size()));
    text = left;
  }
  std::ranges::reverse(parts);
  return parts;
}

}  // namespace

bool is_space(uint32_t c) {
  if (c < 0x80) return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20);
  constexpr std::array<Range, 8> kSpaces{{{0x85, 0x85},
                                          {0xA0, 0xA0},
                                          {0x1680, 0x1680},
                                          {0x2000, 0x200A},
                                          {0x2028, 0x2029},
                                          {0x202F, 0x202F},
                                          {0x205F, 0x205F},
                                          {0x3000, 0x3000}}};
  return within(c, kSpaces);
}

std::string_view lstrip(std::string_view text) { return lstrip_if(text, is_space_character); }
std::string_view rstrip(std::string_view text) { return rstrip_if(text, is_space_character); }
std::string_view strip(std::string_view text) { return lstrip(rstrip(text)); }
std::string_view lstrip(std::string_view text, std::string_view set) { return lstrip_if(text, is_of(set)); }
std::string_view rstrip(std::string_view text, std::string_view set) { return rstrip_if(text, is_of(set)); }

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> all;
  for (size_t at = 0; at < text.size(); at += all.back().size())
    all.push_back(text.substr(at, character_at(text, at).bytes));
  return all;
}

size_t length(std::string_view text) {
  size_t count = 0;
  for (size_t at = 0; at < text.size(); at += character_at(text, at).bytes) ++count;
  return count;
}

size_t byte_offset(std::string_view text, size_t characters) {
  size_t at = 0;
  while (at < text.size() && characters-- > 0) at += character_at(text, at).bytes;
  return at;
}

size_t find(std::string_view text, std::string_view part, size_t at) {
  if (at > text.size()) return text.npos;
  if (part.empty()) return at;
  const void* found = ::memmem(text.data() + at, text.size() - at, part.data(), part.size());
  return found == nullptr ? text.npos : static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

size_t rfind(std::string_view text, std::string_view part) {
  const size_t from_end = find(reversed(text), reversed(part));
  return from_end == text.npos ? text.npos : text.size() - from_end - part.size();
}

size_t count(std::string_view text, std::string_view part) {
  if (part.empty()) return length(text) + 1;
  size_t times = 0;
  for (size_t at = find(text, part); at != text.npos; at = find(text, part, at + part.size())) ++times;
  return times;
}

std::string replace(std::string_view text, std::string_view old, std::string_view with, int64_t most) {
  std::string result;
  int64_t replaced = 0;
  const auto again = [&] { return most < 0 || replaced < most; };
  if (old.empty()) {  // between all characters
    size_t at = 0;
    while (true) {
      if (again()) {
        result += with;
        ++replaced;
      }
      if (at == text.size()) return result;
      const size_t bytes = character_at(text, at).bytes;
      result += text.substr(at, bytes);
      at += bytes;
    }
  }
  size_t at = 0;
  for (size_t next; again() && (next = find(text, old, at)) != text.npos; ++replaced) {
    result += text.substr(at, next - at);
    result += with;
    at = next + old.size();
  }
  return result += text.substr(at);
}

std::vector<std::string_view> split(std::string_view text, std::optional<std::string_view> separator,
                                    int64_t most) {
  if (!separator) return split_at_space(text, most);
  std::vector<std::string_view> parts;
  size_t at = 0;
  while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
    const size_t next = find(text, *separator, at);
    if (next == text.npos) break;
    parts.push_back(text.substr(at, next - at));
    at = next + separator->size();
  }
  parts.push_back(text.substr(at));
  return parts;
}

std::vector<std::string_view> rsplit(std::string_view text, std::optional<std::string_view> separator,
                                     int64_t most) {
  if (!separator) return rsplit_at_space(text, most);
  const std::string backwards = reversed(text), separator_backwards = reversed(*separator);
  std::vector<std::string_view> parts = split(backwards, separator_backwards, most);
  for (std::string_view& part : parts) {
    const size_t end = text.size() - static_cast<size_t>(part.data() - backwards.data());
    part = text.substr(end - part.size(), part.size());
  }
  std::ranges::reverse(parts);
  return parts;
}

std::vector<std::string_view> splitlines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    size_t end = 0;
    Character character{0, 0};
    while (end < text.size() && !is_line_end((character = character_at(text, end)).value))
      end += character.bytes;
    size_t behind = end;
    if (end < text.size()) behind += text.substr(end).starts_with("\r\n") ? 2 : character.bytes;
    lines.push_back(text.substr(0, keep_ends ? behind : end));
    text.remove_prefix(behind);
  }
  return lines;
}

std::string upper(std::string_view text) {
  std::string result;
  for (const std::string_view one : characters(text)) append_upper(one, result);
  return result;
}

std::optional<std::string> lower(std::string_view text) {
  if (has_capital_sigma(text)) return std::nullopt;
  std::string result;
  for (const std::string_view one : characters(text)) append_lower(one, result);
  return result;
}

std::optional<std::string> capitalize(std::string_view text) {
  if (text.empty()) return "";
  const size_t first = character_at(text, 0).bytes;
  const std::optional<std::string> rest = lower(text.substr(first));
  if (!rest) return std::nullopt;
  std::string result;
  append_title(text.substr(0, first), result);
  return result += *rest;
}

std::optional<std::string> title(std::string_view text) {
  std::string result;
  bool behind_letter = false;
  for (const char c : text) {
    if (static_cast<uint8_t>(c) >= 0x80) return std::nullopt;
    const std::string_view one(&c, 1);
    behind_letter ? append_lower(one, result) : append_upper(one, result);
    behind_letter = is_upper(static_cast<uint8_t>(c)) || is_lower(static_cast<uint8_t>(c));
  }
  return result;
}

std::string repr(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string result(1, quote);
  for (const std::string_view one : characters(text)) {
    const uint32_t value = character_at(one, 0).value;
    constexpr std::string_view kEscaped = "\n\r\t\\", kLetters = "nrt\\";
    if (const size_t escape = one.size() == 1 ? kEscaped.find(one[0]) : kEscaped.npos;
        escape != kEscaped.npos) {
      (result += '\\') += kLetters[escape];
    } else if (value == static_cast<uint8_t>(quote)) {
      (result += '\\') += quote;
    } else if (value != kNoCodePoint && (value < 0x20 || value == 0x7F || within(value, kUnprintable))) {
      char digits[16];
      std::snprintf(digits, sizeof digits,
                    value < 0x100     ? "\\x%02x"
                    : value < 0x10000 ? "\\u%04x"
                                      : "\\U%08x",
                    value);
      result += digits;
    } else {
      result += one;
    }
  }
  return result += quote;
}

std::string repr(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  // The shortest digits that read back the same; an exponent below 1e-4 and from 1e16 on.
  std::array<char, 64> buffer{};
  const double size = std::abs(number);
  const bool exponent = size != 0 && (size < 1e-4 || size >= 1e16);
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number,
                                    exponent ? std::chars_format::scientific : std::chars_format::fixed);
  std::string text(buffer.data(), result.ptr);
  if (!exponent && text.find('.') == text.npos) text += ".0";
  return text;
}

}  // namespace halfstep::python
