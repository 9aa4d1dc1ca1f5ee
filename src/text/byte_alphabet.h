// GPT-2's alphabet: a printable character for each of the 256 bytes, so that vocabularies of byte strings can
// be written as text.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace halfstep::text {

/// The character of each byte, as UTF-8: a printable Latin-1 character stands for itself, the other 68 bytes
/// are numbered from U+0100 on.
const std::array<std::string, 256>& byte_characters();

/// The bytes that a token of the vocabulary stands for; nothing when it has a character outside the alphabet.
std::optional<std::string> bytes_of_token(std::string_view token);

}  // namespace halfstep::text
