// AVX2 with FMA and F16C: 8 elements at a time.
#include <immintrin.h>

#include "kernels/update_vectors.h"

namespace halfstep {
namespace {

struct Avx2 {
  using Floats = float __attribute__((vector_size(32)));
  using Words = std::uint32_t __attribute__((vector_size(32)));
  using Doubles = double __attribute__((vector_size(32)));
  using Mask = Words;  // lanes of all ones or all zeros

  static Floats load(const float* values) { return _mm256_loadu_ps(values); }
  static void store(float* values, Floats lanes) { _mm256_storeu_ps(values, lanes); }
  static Words load_words(const std::uint32_t* words) {
    return Words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  }
  static Doubles load_doubles(const double* values) { return _mm256_loadu_pd(values); }
  static void store_doubles(double* values, Doubles lanes) { _mm256_storeu_pd(values, lanes); }
  static __m128i load_codes(const void* codes) { return _mm_loadu_si128(static_cast<const __m128i*>(codes)); }

  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  /// For numbers that are not below `other`: the maximum is its second operand where the first is a NaN.
  static Floats number_or(Floats lanes, float other) { return _mm256_max_ps(lanes, _mm256_set1_ps(other)); }
  static Floats sqrt(Floats lanes) { return _mm256_sqrt_ps(lanes); }
  static Doubles low_doubles(Floats lanes) { return _mm256_cvtps_pd(_mm256_castps256_ps128(lanes)); }
  static Doubles high_doubles(Floats lanes) { return _mm256_cvtps_pd(_mm256_extractf128_ps(lanes, 1)); }
  static Floats to_floats(Words lanes) { return _mm256_cvtepi32_ps(__m256i(lanes)); }

  static Floats load_fp16(const std::uint16_t* codes) { return _mm256_cvtph_ps(load_codes(codes)); }
  static Words widen(const std::uint16_t* codes) { return Words(_mm256_cvtepu16_epi32(load_codes(codes))); }
  static Words widen_signed(const std::uint16_t* codes) {
    return Words(_mm256_cvtepi16_epi32(load_codes(codes)));
  }
  static Words widen(const std::uint8_t* codes) {
    return Words(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  }
  /// Each lane fits 16 bits, so packing does not saturate.
  static __m128i halves_of(Words lanes) {
    return _mm_packus_epi32(_mm256_castsi256_si128(__m256i(lanes)),
                            _mm256_extracti128_si256(__m256i(lanes), 1));
  }
  static void narrow(std::uint16_t* codes, Words lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), halves_of(lanes));
  }
  static void narrow_low_half(std::uint16_t* codes, Words lanes) { narrow(codes, lanes & 0xffffu); }
  static void narrow(std::uint8_t* codes, Words lanes) {
    const __m128i halves = halves_of(lanes);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(halves, halves));
  }

  static Mask is_zero(Words lanes) {
    return Words(_mm256_cmpeq_epi32(__m256i(lanes), _mm256_setzero_si256()));
  }
  static Mask at_most(Words lanes, std::uint32_t limit) {
    const __m256i least = _mm256_min_epu32(__m256i(lanes), _mm256_set1_epi32(int(limit)));
    return Words(_mm256_cmpeq_epi32(least, __m256i(lanes)));
  }
  static Words absolute(Words lanes) { return Words(_mm256_abs_epi32(__m256i(lanes))); }
  static Words choose(Mask condition, Words then, Words otherwise) {
    return Words(_mm256_blendv_epi8(__m256i(otherwise), __m256i(then), __m256i(condition)));
  }
  static Words zero_unless(Mask condition, Words lanes) { return condition & lanes; }
  static Words zero_if_negative(Words lanes, Mask where) {
    const __m256i negative = _mm256_srai_epi32(__m256i(lanes), 31);
    return Words(_mm256_andnot_si256(_mm256_and_si256(negative, __m256i(where)), __m256i(lanes)));
  }
  /// A NaN is not counted, see `asks` in update_scalar.cpp.
  static Mask nonzero(Floats lanes) {
    return Words(_mm256_castps_si256(_mm256_cmp_ps(lanes, _mm256_setzero_ps(), _CMP_NEQ_OQ)));
  }
  static Mask and_equal(Mask mask, Words a, Words b) {
    return mask & Words(_mm256_cmpeq_epi32(__m256i(a), __m256i(b)));
  }
  static void add_one(Words& counters, Mask where) { counters -= where; }
  /// A NaN becomes the quiet one of its sign.
  static Words without_payload(Floats lanes) {
    const Words quiet =
        (Words(__m256i(_mm256_castps_si256(lanes))) & (kFp32Sign | kFp32QuietNan)) | kFp32QuietNan;
    return Words(_mm256_castps_si256(_mm256_blendv_ps(lanes, _mm256_castsi256_ps(__m256i(quiet)),
                                                      _mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q))));
  }

  static Words shift_right(Words lanes, Words by) {
    return Words(_mm256_srlv_epi32(__m256i(lanes), __m256i(by)));
  }
  static Words shift_left(Words lanes, Words by) {
    return Words(_mm256_sllv_epi32(__m256i(lanes), __m256i(by)));
  }
};

}  // namespace

constinit const UpdateStages kAvx2UpdateStages = VectorStages<Avx2>::stages();

}  // namespace halfstep
