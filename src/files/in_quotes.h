// Names from untrusted files in our messages.
#pragma once

#include <string>
#include <string_view>

namespace halfstep::files {

/// The text in single quotes, fit for a terminal and a log: as `printable` escapes it, and no more than the
/// first 80 bytes ("... (1048576 bytes)").
std::string in_quotes(std::string_view text);

/// Its first bytes, `most` or a few less: not cut within a character.
std::string_view beginning_of(std::string_view text, size_t most);

}  // namespace halfstep::files
