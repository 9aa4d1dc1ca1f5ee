// JSON from strangers: nlohmann's parser behind limits that it has not.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

namespace halfstep::files {

struct JsonLimits {
  size_t bytes = size_t{64} << 20;
  int nesting = 64;
  /// A value of three bytes takes a hundred in memory. The largest tokenizers have two million.
  size_t values = 4'000'000;
};

/// Reads one JSON text. Refuses, as an Error that begins with `where` (a path), what is not JSON, invalid
/// UTF-8, a key that stands twice in one object (nlohmann and most readers silently keep the last), and what
/// exceeds the limits.
nlohmann::json read_json(std::string_view text, std::string_view where, const JsonLimits& limits = {});

}  // namespace halfstep::files
