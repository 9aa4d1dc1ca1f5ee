// Text for a terminal.
#pragma once

#include <string>

namespace halfstep::cli {

/// Prints one paragraph in lines of at most 80 columns, each begun with `indent` spaces.
void print_paragraph(const std::string& text, int indent = 0);

}  // namespace halfstep::cli
