// BF16 on its way into tiles: rows of 32 codes, and pairs of neighbours of a sum in one word. All is local to
// the file that includes it, see avx512.cpp for why.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention_vectors_avx512.h"

namespace halfstep {
namespace {

using Code = std::uint16_t;

__m512i load_32(const Code* codes, std::size_t count) {
  const auto lanes = count >= 32 ? 0xffffffffu : (1u << count) - 1;
  return _mm512_maskz_loadu_epi16(lanes, codes);
}

/// Rows of a matrix, with zeros beyond its ends.
struct Source {
  const Code* codes;
  std::ptrdiff_t row;
  std::size_t size, count;  // of a row; rows
  __m512i load(std::size_t at, std::size_t column) const {
    if (at >= count || column >= size) return _mm512_setzero_si512();
    return load_32(codes + static_cast<std::ptrdiff_t>(at) * row + column, size - column);
  }
  /// Calls body(load), where load(i) gives 32 columns of row first + i. Most blocks of 32 rows have no end
  /// within: then nothing is asked row by row.
  template <typename Body>
  [[gnu::always_inline]] void of_block(std::size_t first, std::size_t column, Body body) const {
    const Code* const start = codes + static_cast<std::ptrdiff_t>(first) * row + column;
    if (first + 32 <= count && column + 32 <= size)
      body([start, this](std::size_t i) {
        return _mm512_loadu_si512(start + static_cast<std::ptrdiff_t>(i) * row);
      });
    else
      body([first, column, this](std::size_t i) { return load(first + i, column); });
  }
};

alignas(64) constexpr Code kLowPairs[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
alignas(64) constexpr Code kHighPairs[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                             24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
__m512i low_pairs(__m512i even, __m512i odd) {
  return _mm512_permutex2var_epi16(even, _mm512_load_si512(kLowPairs), odd);
}
__m512i high_pairs(__m512i even, __m512i odd) {
  return _mm512_permutex2var_epi16(even, _mm512_load_si512(kHighPairs), odd);
}

/// Two tiles of 16 rows, each with 32 terms side by side, from a block whose rows are the terms: its columns
/// 0 to 15, and 16 to 31.
template <typename Load>
[[gnu::always_inline]] inline void turn_block(Load load, __m512i (&low)[16], __m512i (&high)[16]) {
  for (std::size_t i = 0; i < 16; ++i) {
    const __m512i even = load(2 * i), odd = load(2 * i + 1);
    low[i] = low_pairs(even, odd);
    high[i] = high_pairs(even, odd);
  }
  Avx512::transpose(low);
  Avx512::transpose(high);
}

}  // namespace
}  // namespace halfstep
