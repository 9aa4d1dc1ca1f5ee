// AVX-512 (F, BW, DQ, VL): 16 elements at a time.
#include <immintrin.h>

#include "kernels/update_vectors.h"

namespace halfstep {
namespace {

struct Avx512 {
  using Floats = float __attribute__((vector_size(64)));
  using Words = std::uint32_t __attribute__((vector_size(64)));
  using Doubles = double __attribute__((vector_size(64)));
  using Mask = __mmask16;

  static Floats load(const float* values) { return _mm512_loadu_ps(values); }
  static void store(float* values, Floats lanes) { _mm512_storeu_ps(values, lanes); }
  static Words load_words(const std::uint32_t* words) { return Words(_mm512_loadu_si512(words)); }
  static Doubles load_doubles(const double* values) { return _mm512_loadu_pd(values); }
  static void store_doubles(double* values, Doubles lanes) { _mm512_storeu_pd(values, lanes); }
  static __m256i load_codes(const void* codes) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(codes));
  }

  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  /// For numbers that are not below `other`: the maximum is its second operand where the first is a NaN.
  static Floats number_or(Floats lanes, float other) { return _mm512_max_ps(lanes, _mm512_set1_ps(other)); }
  static Floats sqrt(Floats lanes) { return _mm512_sqrt_ps(lanes); }
  static Doubles low_doubles(Floats lanes) { return _mm512_cvtps_pd(_mm512_castps512_ps256(lanes)); }
  static Doubles high_doubles(Floats lanes) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(lanes, 1)); }
  static Floats to_floats(Words lanes) { return _mm512_cvtepi32_ps(__m512i(lanes)); }

  static Floats load_fp16(const std::uint16_t* codes) { return _mm512_cvtph_ps(load_codes(codes)); }
  static Words widen(const std::uint16_t* codes) { return Words(_mm512_cvtepu16_epi32(load_codes(codes))); }
  static Words widen_signed(const std::uint16_t* codes) {
    return Words(_mm512_cvtepi16_epi32(load_codes(codes)));
  }
  static Words widen(const std::uint8_t* codes) {
    return Words(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
  }
  static void narrow(std::uint16_t* codes, Words lanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi32_epi16(__m512i(lanes)));
  }
  static void narrow_low_half(std::uint16_t* codes, Words lanes) { narrow(codes, lanes); }
  static void narrow(std::uint8_t* codes, Words lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(__m512i(lanes)));
  }

  static Mask is_zero(Words lanes) { return _mm512_testn_epi32_mask(__m512i(lanes), __m512i(lanes)); }
  static Mask at_most(Words lanes, std::uint32_t limit) {
    return _mm512_cmple_epu32_mask(__m512i(lanes), _mm512_set1_epi32(int(limit)));
  }
  static Words absolute(Words lanes) { return Words(_mm512_abs_epi32(__m512i(lanes))); }
  static Words choose(Mask condition, Words then, Words otherwise) {
    return Words(_mm512_mask_mov_epi32(__m512i(otherwise), condition, __m512i(then)));
  }
  static Words zero_unless(Mask condition, Words lanes) {
    return Words(_mm512_maskz_mov_epi32(condition, __m512i(lanes)));
  }
  static Words zero_if_negative(Words lanes, Mask where) {
    return Words(_mm512_mask_max_epi32(__m512i(lanes), where, __m512i(lanes), _mm512_setzero_si512()));
  }
  /// A NaN is not counted, see `asks` in update_scalar.cpp.
  static Mask nonzero(Floats lanes) { return _mm512_cmp_ps_mask(lanes, _mm512_setzero_ps(), _CMP_NEQ_OQ); }
  static Mask and_equal(Mask mask, Words a, Words b) {
    return _mm512_mask_cmpeq_epi32_mask(mask, __m512i(a), __m512i(b));
  }
  static void add_one(Words& counters, Mask where) {
    counters =
        Words(_mm512_mask_add_epi32(__m512i(counters), where, __m512i(counters), _mm512_set1_epi32(1)));
  }
  /// A NaN becomes the quiet one of its sign: (bits and 0xffc00000) or 0x7fc00000.
  static Words without_payload(Floats lanes) {
    constexpr int kAndThenOr = 0xea;
    const __m512i bits = _mm512_castps_si512(lanes);
    return Words(_mm512_mask_ternarylogic_epi32(bits, _mm512_cmp_ps_mask(lanes, lanes, _CMP_UNORD_Q),
                                                _mm512_set1_epi32(int(kFp32Sign | kFp32QuietNan)),
                                                _mm512_set1_epi32(kFp32QuietNan), kAndThenOr));
  }

  static Words shift_right(Words lanes, Words by) {
    return Words(_mm512_srlv_epi32(__m512i(lanes), __m512i(by)));
  }
  static Words shift_left(Words lanes, Words by) {
    return Words(_mm512_sllv_epi32(__m512i(lanes), __m512i(by)));
  }
};

}  // namespace

constinit const UpdateStages kAvx512UpdateStages = VectorStages<Avx512>::stages();

}  // namespace halfstep
