#include "text/byte_alphabet.h"

#include "words/utf8.h"

namespace halfstep::text {
namespace {

constexpr uint32_t kFirstSubstitute = 0x100;
constexpr uint32_t kSubstitutes = 68;

constexpr bool stands_for_itself(uint32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Alphabet {
  std::array<std::string, 256> characters;
  std::array<int, kFirstSubstitute + kSubstitutes> byte_of;  // by code point; -1: not of the alphabet

  Alphabet() {
    byte_of.fill(-1);
    uint32_t substitute = kFirstSubstitute;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t point = stands_for_itself(byte) ? byte : substitute++;
      append_utf8(point, characters[byte]);
      byte_of[point] = static_cast<int>(byte);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet it;
  return it;
}

}  // namespace

const std::array<std::string, 256>& byte_characters() { return alphabet().characters; }

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const CodePoint point = code_point_at(token, at);
    if (point.bytes == 0 || point.value >= alphabet().byte_of.size()) return std::nullopt;
    const int byte = alphabet().byte_of[point.value];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    at += point.bytes;
  }
  return bytes;
}

}  // namespace halfstep::text
