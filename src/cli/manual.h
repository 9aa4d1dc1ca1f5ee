// The manual page of `halfstep`.
#pragma once

#include <string>

#include "cli/command_tree.h"

namespace halfstep::cli {

/// As roff, for `man`.
std::string manual_page(const Command& root);

}  // namespace halfstep::cli
