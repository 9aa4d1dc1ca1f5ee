// The vectors of AVX-512 (F, BW, DQ, VL), 16 lanes, for the files of attention that have it. All is local to
// the file that includes it, see avx512.cpp for why.
#pragma once

#include <immintrin.h>

#include "kernels/attention_inputs.h"

namespace halfstep {
namespace {

struct Avx512 {
  using Floats = float __attribute__((vector_size(64)));
  // A block of products: 24 of the 32 registers are sums.
  static constexpr int kVectors = 4, kRows = 6;

  static Floats load(const float* values) { return _mm512_loadu_ps(values); }
  static void store(float* values, Floats lanes) { _mm512_storeu_ps(values, lanes); }
  static Floats broadcast(const float* value) { return _mm512_set1_ps(*value); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
  /// The maximum is its second operand where the first is a NaN.
  static Floats number_max(Floats lanes, Floats numbers) { return _mm512_max_ps(lanes, numbers); }
  static Floats zero_where_minus_inf(Floats lanes) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(lanes, _mm512_set1_ps(-kInf), _CMP_NEQ_UQ), lanes);
  }
  /// `before` in the lanes before `first`.
  static Floats from_lane(std::size_t first, Floats lanes, Floats before) {
    return _mm512_mask_mov_ps(before, static_cast<__mmask16>(0xffffu << (first < 16 ? first : 16)), lanes);
  }

  /// Relative error 2^-22; exact at whole numbers, 0 at -Inf.
  static Floats exp2(Floats x) {
    const Floats fraction = _mm512_reduce_ps(x, 0x01);  // from the whole number below
    Floats p = _mm512_set1_ps(0x1.c5417ep-13F);
    for (const float coefficient :
         {0x1.46d64ap-10F, 0x1.3d0b92p-7F, 0x1.c68912p-5F, 0x1.ebfd58p-3F, 0x1.62e42cp-1F, 1.0F})
      p = fma(p, fraction, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(p, x);
  }

  static __mmask16 lanes_before(std::size_t count) {
    return static_cast<__mmask16>((1u << count) - 1);  // count is at most 16
  }
  static Floats load_codes(Format format, const std::uint16_t* codes, std::size_t count) {
    const __m256i words = _mm256_maskz_loadu_epi16(lanes_before(count), codes);
    if (format == Format::FP16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  static void store_codes(Format format, std::uint16_t* codes, Floats lanes, std::size_t count) {
    __m256i words;
    if (format == Format::FP16) {
      words = _mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m512i bits = _mm512_castps_si512(lanes), high = _mm512_srli_epi32(bits, 16);
      const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
      __m512i rounded =
          _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
      // A NaN keeps its sign, and becomes quiet.
      rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(lanes, lanes, _CMP_UNORD_Q), high,
                                     _mm512_set1_epi32(0x40));
      words = _mm512_cvtepi32_epi16(rounded);
    }
    _mm256_mask_storeu_epi16(codes, lanes_before(count), words);
  }

  static void transpose(const float* const from[16], float* to, std::size_t to_row) {
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(from[i]);
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_row, rows[i]);
  }
  /// 16 rows of 16 words, in place.
  [[gnu::always_inline]] static void transpose(__m512i* r) {
    __m512i t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
      r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
      r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
      r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }
};

}  // namespace
}  // namespace halfstep
