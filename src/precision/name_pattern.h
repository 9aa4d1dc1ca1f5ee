// Patterns for names of parameters.
#pragma once

#include <string_view>

namespace halfstep {

/// Whether the whole name fits the pattern: * stands for any characters, none included, ? for one.
inline bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*')
    return matches(pattern.substr(1), name) || (!name.empty() && matches(pattern, name.substr(1)));
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) &&
         matches(pattern.substr(1), name.substr(1));
}

}  // namespace halfstep
