// Printable text as a terminal shows it: how many columns it takes, where to break it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::cli {

/// Of printable text: 2 for characters of East Asia and emoji, 0 for marks that combine with the one before.
size_t columns_of(std::string_view printable_text);

/// Printable text in lines of at most `columns` columns, broken at spaces where there are any; all lines but
/// the first begin with `indent` spaces.
std::vector<std::string> wrapped(std::string_view printable_text, size_t columns, size_t indent);

}  // namespace halfstep::cli
