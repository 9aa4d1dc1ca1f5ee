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

/// Prints one paragraph in lines of at most 80 columns, each begun with `indent` spaces.
void print_paragraph(const std::string& text, int indent = 0);

/// Before the answer is printed: where `file` is the standard output itself (`--out /dev/stdout | gzip`), the
/// answer goes to the standard error, so that whoever reads the file finds nothing else in it.
void keep_answer_out_of(const std::string& file);

}  // namespace halfstep::cli
