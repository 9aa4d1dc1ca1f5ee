// Text as a terminal shows it: what may be sent to one, how many columns it takes, where to break it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::cli {

/// A stranger's words made harmless: control characters, among them those that move the cursor or turn the
/// direction of writing, and bytes that are not UTF-8 become U+FFFD. Line ends and tabs become spaces.
std::string printable(std::string_view text);

/// Of printable text: 2 for characters of East Asia and emoji, 0 for marks that combine with the one before.
size_t columns_of(std::string_view printable_text);

/// Printable text in lines of at most `columns` columns, broken at spaces where there are any; all lines but
/// the first begin with `indent` spaces.
std::vector<std::string> wrapped(std::string_view printable_text, size_t columns, size_t indent);

}  // namespace halfstep::cli
