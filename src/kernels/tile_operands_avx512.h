// BF16 on its way into tiles: rows of 32 codes, and pairs of neighbours of a sum in one word. All is local to
// the file that includes it, see avx512.cpp for why.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

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

}  // namespace
}  // namespace halfstep
