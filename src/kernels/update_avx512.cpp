// AVX-512 (F, BW, DQ, VL): 16 elements at a time.
#include <immintrin.h>

#include "kernels/update_vectors.h"

namespace halfstep {
namespace {

struct Avx512 {
  using Floats = float __attribute__((vector_size(64)));
  using Words = std::uint32_t __attribute__((vector_size(64)));
  using Doubles = double __attribute__((vector_size(64)));

  static Floats load(const float* values) { return _mm512_loadu_ps(values); }
  static void store(float* values, Floats lanes) { _mm512_storeu_ps(values, lanes); }
  static Words load_words(const std::uint32_t* words) { return Words(_mm512_loadu_si512(words)); }
  static Doubles load_doubles(const double* values) { return _mm512_loadu_pd(values); }
  static void store_doubles(double* values, Doubles lanes) { _mm512_storeu_pd(values, lanes); }
  static __m256i load_codes(const void* codes) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(codes));
  }

  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats sqrt(Floats lanes) { return _mm512_sqrt_ps(lanes); }
  static Doubles low_doubles(Floats lanes) { return _mm512_cvtps_pd(_mm512_castps512_ps256(lanes)); }
  static Doubles high_doubles(Floats lanes) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(lanes, 1)); }
  static Floats to_floats(Words lanes) { return _mm512_cvtepi32_ps(__m512i(lanes)); }

  static Floats load_fp16(const std::uint16_t* codes) { return _mm512_cvtph_ps(load_codes(codes)); }
  static Words widen(const std::uint16_t* codes) { return Words(_mm512_cvtepu16_epi32(load_codes(codes))); }
  static Words widen(const std::uint8_t* codes) {
    return Words(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
  }
  static void narrow(std::uint16_t* codes, Words lanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi32_epi16(__m512i(lanes)));
  }
  static void narrow(std::uint8_t* codes, Words lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(__m512i(lanes)));
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
