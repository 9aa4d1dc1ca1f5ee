// What a command prints.
#pragma once

#include <string>

namespace halfstep::cli {

/// Prints one paragraph in lines of at most 80 columns, each begun with `indent` spaces.
void print_paragraph(const std::string& text, int indent = 0);

/// Before the answer is printed: where `file` is the standard output itself (`--out /dev/stdout | gzip`), the
/// answer goes to the standard error, so that whoever reads the file finds nothing else in it.
void keep_answer_out_of(const std::string& file);

}  // namespace halfstep::cli
