// AVX2 with F16C: 8 values at a time.
#include <immintrin.h>

#include "kernels/statistics_loops.h"

namespace halfstep {
namespace {

struct Avx2 {
  using Words = std::uint32_t __attribute__((vector_size(32)));
  using Halves = std::uint16_t __attribute__((vector_size(32)));
  using Doubles = double __attribute__((vector_size(32)));

  template <int format>
  static Words load(const char* values) {
    if constexpr (format == kFp32Grads)
      return Words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    if constexpr (format == kBf16Grads) return Words(_mm256_cvtepu16_epi32(codes)) << 16;
    return Words(_mm256_castps_si256(_mm256_cvtph_ps(codes)));
  }
  static Doubles load_doubles(const double* values) { return _mm256_loadu_pd(values); }
  static void store_doubles(double* values, Doubles lanes) { _mm256_storeu_pd(values, lanes); }
  static Words all(std::uint32_t word) { return Words(_mm256_set1_epi32(static_cast<int>(word))); }

  static Words larger(Words a, Words b) { return Words(_mm256_max_epu32(__m256i(a), __m256i(b))); }
  static Words lesser(Words a, Words b) { return Words(_mm256_min_epu32(__m256i(a), __m256i(b))); }
  static std::uint32_t largest_lane(Words lanes) {
    std::uint32_t largest = 0;
    for (int i = 0; i < 8; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
  }
  static std::uint32_t least_lane(Words lanes) { return ~largest_lane(~lanes); }
  static Words at_least(Words a, Words b) {
    return Words(_mm256_cmpeq_epi32(__m256i(larger(a, b)), __m256i(a)));
  }
  static Words finite_or_zero(Words bits) { return bits & ~at_least(bits & ~kFp32Sign, all(kFp32Inf)); }

  /// Bytes of 32 magnitudes. Not in the order of the values, which makes no difference to a count.
  static Halves bytes_of(const Words* magnitudes, std::uint32_t base) {
    const auto places = [base](Words low, Words high) {
      const __m256i halves = _mm256_packus_epi32(__m256i(low >> 16), __m256i(high >> 16));
      // The last bit of the exponent and the first three of the fraction, as 4 * exponent + ones.
      const __m256i ones_of = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(0, 0, 0, 0, 1, 1, 2, 3, 4 + 0, 4 + 0, 4 + 0, 4 + 0, 4 + 1, 4 + 1, 4 + 2, 4 + 3));
      const __m256i ones =
          _mm256_shuffle_epi8(ones_of, _mm256_and_si256(_mm256_srli_epi16(halves, 4), _mm256_set1_epi16(15)));
      const __m256i exponents = _mm256_and_si256(_mm256_srli_epi16(halves, 5), _mm256_set1_epi16(~7));
      return _mm256_subs_epu16(_mm256_or_si256(exponents, ones), _mm256_set1_epi16(static_cast<short>(base)));
    };
    return Halves(
        _mm256_packus_epi16(places(magnitudes[0], magnitudes[1]), places(magnitudes[2], magnitudes[3])));
  }

  /// Powers of two and fractions that begin with ten ones, which are neighbours when 2^13 is added.
  static Words edges(Words magnitudes) {
    constexpr std::uint32_t kTenOnes = 0x2000u << 9;
    return at_least(all(kTenOnes), (magnitudes << 9) + kTenOnes) & ~is_zero(magnitudes);
  }
  /// Whether one of 32 may be an edge, by the first 16 bits of the fraction.
  static bool may_have_edges(const Words* magnitudes) {
    const auto found = [](Words low, Words high) {
      const __m256i lows = __m256i(larger(low, all(1)) >> 7), highs = __m256i(larger(high, all(1)) << 9);
      const __m256i ten_ones = _mm256_set1_epi16(1 << 6);
      const __m256i behind = _mm256_add_epi16(_mm256_blend_epi16(lows, highs, 0xaa), ten_ones);
      return _mm256_cmpeq_epi16(_mm256_min_epu16(behind, ten_ones), behind);
    };
    const __m256i any =
        _mm256_or_si256(found(magnitudes[0], magnitudes[1]), found(magnitudes[2], magnitudes[3]));
    return !_mm256_testz_si256(any, any);
  }
  static Words outside(Words magnitudes, Window window) {
    return at_least(magnitudes - window.least, all(window.width)) & ~is_zero(magnitudes);
  }
  static Words is_zero(Words magnitudes) {
    return Words(_mm256_cmpeq_epi32(__m256i(magnitudes), _mm256_setzero_si256()));
  }
  static std::size_t store_where(std::uint32_t* words, Words lanes, Words mask) {
    std::size_t stored = 0;
    for (int i = 0; i < 8; ++i)
      if (mask[i]) words[stored++] = lanes[i];
    return stored;
  }
  static std::uint64_t count_from(Words magnitudes, std::uint32_t least) {
    const Words here = ~at_least(magnitudes - least, all(kFp32Inf - least));
    return static_cast<std::uint64_t>(
        __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(__m256i(here))))));
  }

  static Doubles doubles_at(const char* values) {
    return _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(values)));
  }
  static Doubles low_doubles(Words bits) {
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm256_castsi256_si128(__m256i(bits))));
  }
  static Doubles high_doubles(Words bits) {
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm256_extracti128_si256(__m256i(bits), 1)));
  }
};

}  // namespace

constinit const StatisticsPass kAvx2Statistics = VectorStatistics<Avx2>::pass();

}  // namespace halfstep
