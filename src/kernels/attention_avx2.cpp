// AVX2, FMA and F16C: 8 elements at a time.
#include <immintrin.h>

#include "kernels/attention_blocks.h"

namespace halfstep {
namespace {

struct Avx2 {
  using Floats = float __attribute__((vector_size(32)));
  // A block of products: 12 of the 16 registers are sums.
  static constexpr int kVectors = 2, kRows = 6;

  static Floats load(const float* values) { return _mm256_loadu_ps(values); }
  static void store(float* values, Floats lanes) { _mm256_storeu_ps(values, lanes); }
  static Floats broadcast(const float* value) { return _mm256_broadcast_ss(value); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats fms(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
  /// The maximum is its second operand where the first is a NaN.
  static Floats number_max(Floats lanes, Floats numbers) { return _mm256_max_ps(lanes, numbers); }
  static Floats zero_where_minus_inf(Floats lanes) {
    return _mm256_and_ps(_mm256_cmp_ps(lanes, _mm256_set1_ps(-kInf), _CMP_NEQ_UQ), lanes);
  }
  /// `before` in the lanes before `first`.
  static Floats from_lane(std::size_t first, Floats lanes, Floats before) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i is_before = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(first)), index);
    return _mm256_blendv_ps(lanes, before, _mm256_castsi256_ps(is_before));
  }

  /// Relative error 2^-22; exact at whole numbers, 0 at -Inf.
  static Floats exp2(Floats x) {
    // Beyond these the result is 0 or Inf; a NaN, as the second operand, stays.
    x = _mm256_max_ps(_mm256_set1_ps(-160), _mm256_min_ps(_mm256_set1_ps(160), x));
    const Floats whole = _mm256_floor_ps(x), fraction = x - whole;
    Floats p = _mm256_set1_ps(0x1.c5417ep-13F);
    for (const float coefficient :
         {0x1.46d64ap-10F, 0x1.3d0b92p-7F, 0x1.c68912p-5F, 0x1.ebfd58p-3F, 0x1.62e42cp-1F, 1.0F})
      p = fma(p, fraction, _mm256_set1_ps(coefficient));
    // In two steps, each a power of two that FP32 has.
    const __m256i power = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(power, 1);
    return p * power_of_two(half) * power_of_two(_mm256_sub_epi32(power, half));
  }
  static Floats power_of_two(__m256i power) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23));
  }

  static Floats load_codes(Format format, const std::uint16_t* codes, std::size_t count) {
    __m128i words;
    if (count == 8) {
      words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    } else {
      std::uint16_t some[8] = {};
      for (std::size_t i = 0; i < count; ++i) some[i] = codes[i];
      words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(some));
    }
    if (format == Format::FP16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  static void store_codes(Format format, std::uint16_t* codes, Floats lanes, std::size_t count) {
    __m128i words;
    if (format == Format::FP16) {
      words = _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i bits = _mm256_castps_si256(lanes), high = _mm256_srli_epi32(bits, 16);
      const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
      const __m256i rounded =
          _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
      // A NaN keeps its sign, and becomes quiet.
      const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
      const __m256i chosen =
          _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q)));
      words = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
    }
    if (count == 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), words);
    } else {
      std::uint16_t some[8];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(some), words);
      for (std::size_t i = 0; i < count; ++i) codes[i] = some[i];
    }
  }

  static void transpose(const float* const from[8], float* to, std::size_t to_row) {
    for (std::size_t i = 0; i < 8; ++i)
      for (std::size_t r = 0; r < 8; ++r) to[i * to_row + r] = from[r][i];
  }
};

}  // namespace

constinit const AttentionLoops kAvx2Attention = Attention<Avx2>::kLoops;

}  // namespace halfstep
