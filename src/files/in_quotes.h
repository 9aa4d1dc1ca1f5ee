// A stranger's words in our messages.
#pragma once

#include <string>
#include <string_view>

namespace halfstep::files {

/// The text in single quotes, fit for a terminal and a log: control characters as \x1b, and no more than the
/// first 80 bytes ("... (1048576 bytes)").
std::string in_quotes(std::string_view text);

}  // namespace halfstep::files
