// What every fuzz target needs.
#pragma once

#include <halfstep/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>

/// libFuzzer calls this once an input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace halfstep::testing {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// A property that every input must keep; without it the fuzzer stops and keeps the input.
inline void require(bool holds, const char* property) {
  if (holds) return;
  std::fprintf(stderr, "property broken: %s\n", property);
  std::abort();
}

/// Reads, and lets a refusal pass: an Error is what strangers' bytes deserve. A Bug is not, nor any exception
/// of another kind.
void read_or_refuse(auto&& read) {
  try {
    read();
  } catch (const Bug& bug) {
    require(false, bug.what());
  } catch (const Error&) {
  }
}

}  // namespace halfstep::testing
