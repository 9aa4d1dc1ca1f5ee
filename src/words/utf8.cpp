#include "words/utf8.h"

#include <cstring>

namespace halfstep {
namespace {

struct Lead {
  uint32_t bytes;
  uint8_t second_low, second_high;  // what the second byte may be; the later ones are 80..BF
};

constexpr Lead lead_of(uint8_t byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

CodePoint code_point_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
  if (byte(0) < 0x80) return {byte(0), 1, false};
  const Lead lead = lead_of(byte(0));
  if (lead.bytes == 0) return {};
  uint32_t value = byte(0) & (0x7Fu >> lead.bytes);
  for (uint32_t i = 1; i < lead.bytes; ++i) {
    if (at + i == text.size()) return {0, 0, true};
    const uint8_t low = i == 1 ? lead.second_low : 0x80, high = i == 1 ? lead.second_high : 0xBF;
    if (byte(i) < low || byte(i) > high) return {};
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  return {value, lead.bytes, false};
}

size_t valid_bytes_from(std::string_view text, size_t at) {
  const size_t begin = at;
  while (at < text.size()) {
    uint64_t eight = 0;
    if (at + 8 <= text.size()) {
      std::memcpy(&eight, text.data() + at, 8);
      if ((eight & 0x8080808080808080u) == 0) {
        at += 8;
        continue;
      }
    }
    const CodePoint point = code_point_at(text, at);
    if (point.bytes == 0) break;
    at += point.bytes;
  }
  return at - begin;
}

std::string valid_utf8(std::string_view text) {
  std::string valid;
  for (size_t at = 0; at < text.size(); ++at) {
    const size_t bytes = valid_bytes_from(text, at);
    valid += text.substr(at, bytes);
    at += bytes;
    if (at < text.size()) valid += "\uFFFD";
  }
  return valid;
}

void append_utf8(uint32_t code_point, std::string& text) {
  const auto put = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

}  // namespace halfstep
