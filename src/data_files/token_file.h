// What the reader and the writer of token files share.
#pragma once

#include <halfstep/token_file.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace halfstep::files {

inline constexpr size_t kLlmcHeaderWords = 256;
inline constexpr size_t kLlmcHeaderBytes = kLlmcHeaderWords * sizeof(int32_t);

struct LlmcMark {
  TokenFormat format;
  int32_t magic;
  int32_t version;
};

// From llm.c's dev/data/data_common.py.
inline constexpr LlmcMark kLlmcMarks[] = {{TokenFormat::Llmc16, 20240520, 1},
                                          {TokenFormat::Llmc32, 20240801, 7}};

constexpr const LlmcMark* mark_of(TokenFormat format) {
  for (const LlmcMark& mark : kLlmcMarks)
    if (mark.format == format) return &mark;
  return nullptr;
}

}  // namespace halfstep::files
