// Patterns for names of parameters.
#pragma once

#include <cstddef>
#include <string_view>

namespace halfstep {

/// Whether the whole name fits the pattern: * stands for any characters, none included, ? for one.
inline bool matches(std::string_view pattern, std::string_view name) {
  // Back to the last star only: what an earlier one could take, the last can take as well.
  std::size_t p = 0, n = 0, star = std::string_view::npos, taken_by_star = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken_by_star = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++taken_by_star;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace halfstep
