// Unicode's normalization form C, exactly as the package `tokenizers` computes it.
//
// `tokenizers` 0.23 knows the marks of Unicode 9, utf8proc 2.8 those of Unicode 15: the 108 marks that came
// between are starters that nothing joins or sorts. tools/unicode_ranges.py asks `tokenizers` about every
// code point; tools/tokenizer_parity compares.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace halfstep::text {

/// Appends the form NFC of `text`. Bytes that are not valid UTF-8 stay, and end what is joined and sorted.
void append_nfc(std::string_view text, std::string& normalized);
std::string nfc_of(std::string_view text);

/// How many of the first bytes of `text` have a form NFC that no text behind it can change.
size_t settled_in_nfc(std::string_view text);

}  // namespace halfstep::text
