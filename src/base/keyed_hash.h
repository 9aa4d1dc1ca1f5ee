// A hash of text for names that others choose.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace halfstep {

/// A polynomial over the field of 2^61 - 1, evaluated at a point that is drawn anew in every process. Texts
/// that collide under std::hash can be computed, and thirty thousand of them in a file make a table take
/// seconds; here two texts of n bytes collide with a chance of about n / 2^63, whoever chose them.
struct KeyedHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const;
};

template <typename Value>
using TextMap = std::unordered_map<std::string, Value, KeyedHash, std::equal_to<>>;

}  // namespace halfstep
