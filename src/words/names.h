// Names from untrusted files in our messages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// The text in single quotes, fit for a terminal and a log: as `printable` escapes it, and no more than the
/// first 80 bytes ("... (1048576 bytes)").
std::string in_quotes(std::string_view text);

/// Its first bytes, `most` or a few less: not cut within a character.
std::string_view beginning_of(std::string_view text, size_t most);

/// JSON that is printed: what `printable` would not let through becomes \\u009b, which reads back the same.
std::string printable_json(std::string_view json);

/// Levenshtein's: how many bytes to insert, remove or replace.
size_t edit_distance(std::string_view a, std::string_view b);

/// " Did you mean 'wte.weight'?", or "" when no name is near.
std::string did_you_mean(std::string_view wanted, const std::vector<std::string_view>& names);

}  // namespace halfstep
