// What Python's `str` does, on UTF-8. A byte that belongs to no valid code point counts as a character and is
// kept as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::python {

bool is_space(uint32_t code_point);

std::string_view lstrip(std::string_view text);
std::string_view rstrip(std::string_view text);
std::string_view strip(std::string_view text);
/// Of the characters in `set`.
std::string_view lstrip(std::string_view text, std::string_view set);
std::string_view rstrip(std::string_view text, std::string_view set);

std::vector<std::string_view> characters(std::string_view text);
/// In characters.
size_t length(std::string_view text);
/// Of the character at this place, in bytes; the end, if there are fewer.
size_t byte_offset(std::string_view text, size_t characters);

/// In bytes, from `at`; npos if there is none. Linear in the worst case, unlike std::string_view::find.
size_t find(std::string_view text, std::string_view part, size_t at = 0);
size_t rfind(std::string_view text, std::string_view part);
/// How often `part` occurs, without overlaps.
size_t count(std::string_view text, std::string_view part);

/// The first `most` ones; negative: all.
std::string replace(std::string_view text, std::string_view old, std::string_view with, int64_t most = -1);

/// At runs of white space, or at each `separator`. `most` cuts, from the left or from the right; negative:
/// all.
std::vector<std::string_view> split(std::string_view text, std::optional<std::string_view> separator,
                                    int64_t most);
std::vector<std::string_view> rsplit(std::string_view text, std::optional<std::string_view> separator,
                                     int64_t most);
std::vector<std::string_view> splitlines(std::string_view text, bool keep_ends);

std::string upper(std::string_view text);
/// Nothing if there is a capital sigma, which becomes one of two letters, by its neighbours.
std::optional<std::string> lower(std::string_view text);
/// The first character in title case, the others in lower case.
std::optional<std::string> capitalize(std::string_view text);
/// Every character behind one that is no letter in upper case, the others in lower case. ASCII only.
std::optional<std::string> title(std::string_view text);

std::string repr(std::string_view text);
std::string repr(double number);

}  // namespace halfstep::python
