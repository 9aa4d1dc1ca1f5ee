// AVX-512 (F, BW, DQ, VL): 16 values at a time.
#include <immintrin.h>

#include "kernels/statistics_loops.h"

namespace halfstep {
namespace {

struct Avx512 {
  using Words = std::uint32_t __attribute__((vector_size(64)));
  using Quads = std::uint64_t __attribute__((vector_size(64)));
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
  static std::uint32_t largest_lane(Words lanes) { return _mm512_reduce_max_epu32(__m512i(lanes)); }
  static Words finite_or_zero(Words bits) {
    const __mmask16 finite = _mm512_cmplt_epu32_mask(__m512i(bits & ~kFp32Sign), __m512i(all(kFp32Inf)));
    return Words(_mm512_maskz_mov_epi32(finite, __m512i(bits)));
  }

  /// Bytes of 64 magnitudes. Not in the order of the values, which makes no difference to a count.
  static Quads bytes_of(const Words* magnitudes, std::uint32_t base) {
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
    return Quads(
        _mm512_packus_epi16(places(magnitudes[0], magnitudes[1]), places(magnitudes[2], magnitudes[3])));
  }

  /// Powers of two and fractions that begin with ten ones, which are neighbours when 2^13 is added; and 0.
  static __mmask16 is_edge(Words magnitudes) {
    constexpr std::uint32_t kTenOnes = 0x2000u << 9;
    return _mm512_cmple_epu32_mask(__m512i((magnitudes << 9) + kTenOnes), __m512i(all(kTenOnes)));
  }
  /// Whether one of 64 is an edge or may be outside of the window: a byte of 0 or 255, which zeros have too.
  static bool may_be_apart(Quads bytes, const Words* magnitudes) {
    __mmask16 edges = 0;
    for (int v = 0; v < 4; ++v) edges |= is_edge(larger(magnitudes[v], all(1)));
    const __m512i from_1 = _mm512_sub_epi8(__m512i(bytes), _mm512_set1_epi8(1));
    return (_mm512_cmpge_epu8_mask(from_1, _mm512_set1_epi8(static_cast<char>(254))) | edges) != 0;
  }
  static __mmask16 to_count_apart(Words magnitudes, Window window) {
    const __mmask16 outside =
        _mm512_cmpge_epu32_mask(__m512i(magnitudes - window.least), __m512i(all(window.width)));
    return (is_edge(magnitudes) | outside) & _mm512_test_epi32_mask(__m512i(magnitudes), __m512i(magnitudes));
  }
  static std::size_t store_where(std::uint32_t* words, Words lanes, __mmask16 mask) {
    _mm512_storeu_si512(words, _mm512_maskz_compress_epi32(mask, __m512i(lanes)));
    return static_cast<std::size_t>(__builtin_popcount(mask));
  }
  static std::uint64_t count_from(Words magnitudes, std::uint32_t least) {
    return static_cast<std::uint64_t>(__builtin_popcount(
        _mm512_cmplt_epu32_mask(__m512i(magnitudes - least), __m512i(all(kFp32Inf - least)))));
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
