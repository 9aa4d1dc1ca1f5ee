// Text that is safe to print. Knows no Torch.
#pragma once

#include <halfstep/config.h>

#include <string>
#include <string_view>

namespace halfstep {

/// What stands in the place of a character that a terminal obeys, and of a byte that is not UTF-8.
enum class Unprintable {
  Escaped,   ///< `\x1b`, `\u009b`, `\u202e`, `\xff`: what it was can be read. For names.
  Replaced,  ///< U+FFFD, and a space for line ends and tabs. For running text.
};

/// One line of UTF-8 without control characters: neither C0 (ESC among them) nor C1, which are ESC sequences
/// in one character, nor those that end a line or turn the direction of writing. Names in files from
/// elsewhere, and names of files, go through it on their way into a message.
///
///     std::cerr << halfstep::printable(tensor_name, halfstep::Unprintable::Escaped) << "\n";
[[nodiscard]] HALFSTEP_API std::string printable(std::string_view text, Unprintable unprintable);

}  // namespace halfstep
