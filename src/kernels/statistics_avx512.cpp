// AVX-512 (F, BW, DQ, VL): 16 values at a time.
#include <immintrin.h>

#include "kernels/statistics_loops.h"

namespace halfstep {
namespace {

struct Avx512 {
  using Words = std::uint32_t __attribute__((vector_size(64)));
  using Halves = std::uint16_t __attribute__((vector_size(64)));
  using Doubles = double __attribute__((vector_size(64)));

  template <int format>
  static Words load(const char* values) {
    if constexpr (format == kFp32Grads) return Words(_mm512_loadu_si512(values));
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    if constexpr (format == kBf16Grads) return Words(_mm512_cvtepu16_epi32(codes)) << 16;
    return Words(_mm512_castps_si512(_mm512_cvtph_ps(codes)));
  }
  static Doubles load_doubles(const double* values) { return _mm512_loadu_pd(values); }
  static void store_doubles(double* values, Doubles lanes) { _mm512_storeu_pd(values, lanes); }
  static Words all(std::uint32_t word) { return Words(_mm512_set1_epi32(static_cast<int>(word))); }

  static Words larger(Words a, Words b) { return Words(_mm512_max_epu32(__m512i(a), __m512i(b))); }
  static Words lesser(Words a, Words b) { return Words(_mm512_min_epu32(__m512i(a), __m512i(b))); }
  static std::uint32_t largest_lane(Words lanes) { return _mm512_reduce_max_epu32(__m512i(lanes)); }
  static std::uint32_t least_lane(Words lanes) { return _mm512_reduce_min_epu32(__m512i(lanes)); }
  static Words finite_or_zero(Words bits) {
    const __mmask16 finite = _mm512_cmplt_epu32_mask(__m512i(bits & ~kFp32Sign), __m512i(all(kFp32Inf)));
    return Words(_mm512_maskz_mov_epi32(finite, __m512i(bits)));
  }

  /// Bytes of 64 magnitudes. Not in the order of the values, which makes no difference to a count.
  static Halves bytes_of(const Words* magnitudes, std::uint32_t base) {
    const auto places = [base](Words low, Words high) {
      const __m512i halves = _mm512_packus_epi32(__m512i(low >> 16), __m512i(high >> 16));
      // The last bit of the exponent and the first three of the fraction, as 4 * exponent + ones.
      const __m512i ones_of = _mm512_broadcast_i32x4(
          _mm_setr_epi8(0, 0, 0, 0, 1, 1, 2, 3, 4 + 0, 4 + 0, 4 + 0, 4 + 0, 4 + 1, 4 + 1, 4 + 2, 4 + 3));
      const __m512i ones =
          _mm512_shuffle_epi8(ones_of, _mm512_and_si512(_mm512_srli_epi16(halves, 4), _mm512_set1_epi16(15)));
      const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(halves, 5), _mm512_set1_epi16(~7));
      return _mm512_subs_epu16(_mm512_or_si512(exponents, ones), _mm512_set1_epi16(static_cast<short>(base)));
    };
    return Halves(
        _mm512_packus_epi16(places(magnitudes[0], magnitudes[1]), places(magnitudes[2], magnitudes[3])));
  }

  /// Powers of two and fractions that begin with ten ones, which are neighbours when 2^13 is added.
  static __mmask16 edges(Words magnitudes) {
    constexpr std::uint32_t kTenOnes = 0x2000u << 9;
    return _mm512_mask_cmple_epu32_mask(nonzero(magnitudes), __m512i((magnitudes << 9) + kTenOnes),
                                        __m512i(all(kTenOnes)));
  }
  /// Whether one of 64 may be an edge, by the first 16 bits of the fraction.
  static bool may_have_edges(const Words* magnitudes) {
    const auto found = [](Words low, Words high) {
      const __m512i lows = __m512i(larger(low, all(1)) >> 7), highs = __m512i(larger(high, all(1)) << 9);
      const __m512i fractions =
          _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), lows, highs, 0xca);  // a choice by bits
      const __m512i ten_ones = _mm512_set1_epi16(1 << 6);
      return _mm512_cmple_epu16_mask(_mm512_add_epi16(fractions, ten_ones), ten_ones);
    };
    return (found(magnitudes[0], magnitudes[1]) | found(magnitudes[2], magnitudes[3])) != 0;
  }
  static __mmask16 outside(Words magnitudes, Window window) {
    return _mm512_mask_cmpge_epu32_mask(nonzero(magnitudes), __m512i(magnitudes - window.least),
                                        __m512i(all(window.width)));
  }
  static __mmask16 nonzero(Words magnitudes) {
    return _mm512_test_epi32_mask(__m512i(magnitudes), __m512i(magnitudes));
  }
  static std::size_t store_where(std::uint32_t* words, Words lanes, __mmask16 mask) {
    _mm512_storeu_si512(words, _mm512_maskz_compress_epi32(mask, __m512i(lanes)));
    return static_cast<std::size_t>(__builtin_popcount(mask));
  }
  static std::uint64_t count_from(Words magnitudes, std::uint32_t least) {
    return static_cast<std::uint64_t>(__builtin_popcount(
        _mm512_cmplt_epu32_mask(__m512i(magnitudes - least), __m512i(all(kFp32Inf - least)))));
  }

  static Doubles doubles_at(const char* values) {
    return _mm512_cvtps_pd(_mm256_loadu_ps(reinterpret_cast<const float*>(values)));
  }
  static Doubles low_doubles(Words bits) {
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(__m512i(bits))));
  }
  static Doubles high_doubles(Words bits) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(_mm512_castsi512_ps(__m512i(bits)), 1));
  }
};

}  // namespace

constinit const StatisticsPass kAvx512Statistics = VectorStatistics<Avx512>::pass();

}  // namespace halfstep
