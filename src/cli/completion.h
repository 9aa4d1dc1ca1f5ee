// Scripts with which shells complete the command line of `halfstep`.
#pragma once

#include <string>

#include "cli/command_tree.h"

namespace halfstep::cli {

/// Needs bash 4.4, and none of the package bash-completion.
std::string bash_completion(const Command& root);
std::string zsh_completion(const Command& root);
std::string fish_completion(const Command& root);

/// 'it'\''s', as all three shells read it.
std::string quoted(const std::string& text);

/// As roff, for `man`.
std::string manual_page(const Command& root);

}  // namespace halfstep::cli
