// A whole number as a person reads it.
#pragma once

#include <cstdint>
#include <string>

namespace halfstep {

/// "1,234,567".
inline std::string with_commas(int64_t value) {
  std::string text = std::to_string(value);
  const int first = value < 0 ? 1 : 0;
  for (int place = static_cast<int>(text.size()) - 3; place > first; place -= 3)
    text.insert(static_cast<size_t>(place), 1, ',');
  return text;
}

}  // namespace halfstep
