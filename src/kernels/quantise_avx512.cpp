// The loops that the compiler makes vectors of, and by hand the one that all of a recipe's values go through.
#include <immintrin.h>

#include "kernels/quantise_loops.h"

namespace halfstep {
namespace {

constexpr std::size_t kAtOnce = 64;  // codes of one store

inline __m512 load16(const float* values) { return _mm512_loadu_ps(values); }
inline __m512 load16(const std::uint16_t* values) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
}

/// Bit i: values[i] is not zero, or is negative.
struct Found {
  __mmask64 nonzero, negative;
};

inline Found look(const std::uint16_t* values) {
  const __m512i low = _mm512_loadu_si512(values), high = _mm512_loadu_si512(values + 32);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  return {.nonzero = _mm512_kunpackd(_mm512_test_epi16_mask(high, magnitude),
                                     _mm512_test_epi16_mask(low, magnitude)),
          .negative = _mm512_kunpackd(_mm512_movepi16_mask(high), _mm512_movepi16_mask(low))};
}

inline Found look(const float* values) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __mmask64 nonzero = 0, negative = 0;
  for (int quarter = 3; quarter >= 0; --quarter) {
    const __m512i bits = _mm512_loadu_si512(values + 16 * quarter);
    nonzero = nonzero << 16 | _mm512_test_epi32_mask(bits, magnitude);
    negative = negative << 16 | _mm512_movepi32_mask(bits);
  }
  return {nonzero, negative};
}

/// encode<format, Value, true> of quantise_loops.h, 64 codes at a time: zeros and signs are looked at as bits
/// of masks.
template <Format format, typename Value>
void encode_finite(const void* given, const float* factors, std::uint8_t* codes, std::size_t count,
                   std::uint32_t* counts) {
  constexpr CastConstants k = cast_constants(format);
  constexpr int kDropped = 23 - k.mantissa_bits;
  constexpr std::uint32_t kFirstNormal = k.first_normal << 23;
  constexpr std::uint32_t kMax = (k.max_code + ((k.first_normal - 1) << k.mantissa_bits)) << kDropped;
  constexpr std::uint32_t kLastHeldAlone = kMax + (1u << (kDropped - 1)) - (k.max_code % 2 == 0 ? 0 : 1);
  const auto all = [](std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); };
  const __m512i magnitude_bits = all(~kFp32Sign), exponent_bits = all(kFp32Inf), max = all(kMax);
  const __m512i first_normal = all(kFirstNormal), last_held_alone = all(kLastHeldAlone);
  const __m512i to_power = all(static_cast<std::uint32_t>(kDropped) << 23), minus_one = all(~0u);
  // Of each dword of four packed vectors, where it lies after packing within lanes.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i base = _mm512_set1_epi16(static_cast<short>(kFirstNormal >> kDropped));
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(1 << k.sign_position));

  const auto* values = static_cast<const Value*>(given);
  __m512i saturated = _mm512_setzero_si512();
  std::uint64_t vanished = 0;
  const auto sixteen = [&](std::size_t at) {
    const __m512 product = _mm512_mul_ps(load16(values + at), _mm512_loadu_ps(factors + at));
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(product), magnitude_bits);
    saturated = _mm512_mask_sub_epi32(saturated, _mm512_cmpgt_epu32_mask(magnitude, last_held_alone),
                                      saturated, minus_one);
    const __m512i held = _mm512_min_epu32(magnitude, max);
    const __m512i unit = _mm512_max_epu32(_mm512_and_si512(held, exponent_bits), first_normal);
    const __m512i power = _mm512_add_epi32(unit, to_power);
    const __m512i sum =
        _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(held), _mm512_castsi512_ps(power)));
    return _mm512_add_epi32(_mm512_sub_epi32(sum, power), _mm512_srli_epi32(unit, kDropped));
  };
  const auto thirty_two = [&](std::size_t at) {
    return _mm512_sub_epi16(_mm512_packus_epi32(sixteen(at), sixteen(at + 16)), base);
  };
  std::size_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    const __m512i magnitudes =
        _mm512_permutexvar_epi32(in_order, _mm512_packus_epi16(thirty_two(i), thirty_two(i + 32)));

    const Found found = look(values + i);
    vanished += static_cast<std::uint64_t>(
        __builtin_popcountll(_mm512_mask_testn_epi8_mask(found.nonzero, magnitudes, magnitudes)));
    _mm512_storeu_si512(codes + i, _mm512_mask_add_epi8(magnitudes, found.negative, magnitudes, sign));
  }
  counts[0] += static_cast<std::uint32_t>(_mm512_reduce_add_epi32(saturated));
  counts[1] += static_cast<std::uint32_t>(vanished);
  encode<format, Value, true>(values + i, factors + i, codes + i, count - i, counts);
}

template <Format format>
constexpr QuantiseRows::OfFormat by_hand(QuantiseRows::OfFormat rows) {
  rows.encode_finite[0] = encode_finite<format, float>;
  rows.encode_finite[1] = encode_finite<format, std::uint16_t>;
  return rows;
}

constexpr QuantiseRows with_rows_by_hand(QuantiseRows rows) {
  rows.of_format[0] = by_hand<Format::E4M3>(rows.of_format[0]);
  rows.of_format[1] = by_hand<Format::E5M2>(rows.of_format[1]);
  rows.of_format[2] = by_hand<Format::E2M1>(rows.of_format[2]);
  return rows;
}

}  // namespace

constinit const QuantiseRows kAvx512QuantiseRows = with_rows_by_hand(kRows);

}  // namespace halfstep
