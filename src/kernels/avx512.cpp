// AVX-512 (F, BW, DQ, VL). Same functions, same order, same arithmetic as scalar.cpp, 16 elements at a time.
// Includes almost nothing, and everything is local to this file: code compiled for AVX-512 must not become
// the one copy of an inline function that the linker keeps for everybody.
#include <immintrin.h>

#include "formats/philox.h"
#include "kernels/cast_constants.h"
#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

constexpr std::size_t kWidth = 16;
using Words = __m512i;  // 16 lanes of 32 bits

Words all(std::uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

template <Format format>
Words load_codes(const Code<format>* codes) {
  if constexpr (sizeof(Code<format>) == 1) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  } else if constexpr (sizeof(Code<format>) == 2) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  } else {
    return _mm512_loadu_si512(codes);
  }
}

template <Format format>
void store_codes(Code<format>* codes, Words words) {
  if constexpr (sizeof(Code<format>) == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(words));
  } else if constexpr (sizeof(Code<format>) == 2) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi32_epi16(words));
  } else {
    _mm512_storeu_si512(codes, words);
  }
}

template <Format format, Rounding rounding>
Words cast_words(Words bits, SpecialResults special, Words random) {
  constexpr CastConstants k = cast_constants(format);
  const Words magnitude = _mm512_and_si512(bits, all(~kFp32Sign));
  const Words fraction_field = _mm512_and_si512(bits, all(kFp32HiddenBit - 1));
  const __mmask16 normal = _mm512_cmpge_epu32_mask(magnitude, all(kFp32HiddenBit));
  const Words significand = _mm512_mask_or_epi32(fraction_field, normal, fraction_field, all(kFp32HiddenBit));
  const Words exponent = _mm512_max_epu32(_mm512_srli_epi32(magnitude, 23), all(1));

  // Shifts by 32 and more, and by "negative" counts, give 0: the two halves of the 32.32 number need no
  // branch.
  const Words coarse_exponent = _mm512_max_epu32(exponent, all(k.first_normal));
  const Words shift =
      _mm512_add_epi32(_mm512_sub_epi32(coarse_exponent, exponent), all(23 - k.mantissa_bits));
  const Words steps = _mm512_srlv_epi32(significand, shift);
  Words fraction = _mm512_sllv_epi32(significand, _mm512_sub_epi32(all(32), shift));
  // A fraction that begins below its highest bits is far from one half, and matters to random rounding alone.
  if constexpr (rounding == Rounding::Stochastic)
    fraction = _mm512_or_si512(fraction, _mm512_srlv_epi32(significand, _mm512_sub_epi32(shift, all(32))));
  Words rounded = steps;
  if constexpr (rounding != Rounding::TowardZero) {
    const Words odd = _mm512_and_si512(steps, all(1));
    const Words addend = rounding == Rounding::Stochastic ? random : _mm512_add_epi32(odd, all(0x7fffffff));
    const __mmask16 carry = _mm512_cmplt_epu32_mask(_mm512_add_epi32(fraction, addend), fraction);
    rounded = _mm512_mask_add_epi32(steps, carry, steps, all(1));
  }
  Words code = _mm512_add_epi32(
      rounded, _mm512_slli_epi32(_mm512_sub_epi32(coarse_exponent, all(k.first_normal)), k.mantissa_bits));

  code = _mm512_mask_mov_epi32(code, _mm512_cmpgt_epu32_mask(code, all(k.max_code)), all(special.overflow));
  code = _mm512_mask_mov_epi32(code, _mm512_cmpeq_epu32_mask(magnitude, all(kFp32Inf)), all(special.inf));
  const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, all(kFp32Inf));
  code = _mm512_mask_mov_epi32(code, nan, all(k.nan_code));

  __mmask16 signed_result = _mm512_movepi32_mask(bits);
  if constexpr (k.minus_zero_is_nan) signed_result &= _mm512_test_epi32_mask(code, code);
  if constexpr (!k.has_nan) signed_result &= static_cast<__mmask16>(~nan);
  code = _mm512_slli_epi32(code, k.unused_low_bits);
  return _mm512_mask_or_epi32(code, signed_result, code, all(1u << k.sign_position));
}

/// Does what is left when the vectors are full.
template <Format format>
constexpr const FormatKernels& kTwin = kScalarKernels.format[static_cast<int>(format)];

template <Format format, Rounding rounding>
void cast(const float* values, void* codes, std::size_t count, SpecialResults special) {
  auto* out = static_cast<Code<format>*>(codes);
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    store_codes<format>(out + i, cast_words<format, rounding>(_mm512_loadu_si512(values + i), special,
                                                              _mm512_setzero_si512()));
  constexpr bool nearest = rounding == Rounding::NearestEven;
  (nearest ? kTwin<format>.nearest_even : kTwin<format>.toward_zero)(values + i, out + i, count - i, special);
}

struct Product {
  Words high, low;
};

Product multiply(Words lanes, std::uint32_t factor) {
  const Words even = _mm512_mul_epu32(lanes, all(factor));
  const Words odd = _mm512_mul_epu32(_mm512_srli_epi64(lanes, 32), all(factor));
  return {_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd),
          _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32))};
}

struct RandomWords {
  Words of_vector[4];
};

/// The random bits of the 64 elements from 4 * first_block on.
RandomWords random_words(StochasticKey key, std::uint64_t first_block) {
  // A block makes four neighbouring words, a vector of blocks four vectors of one word each. With the blocks
  // dealt out in this order, the 4x4 transpositions inside 128-bit lanes below put every word in its place.
  const Words order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const Words first_low = all(static_cast<std::uint32_t>(first_block));
  const Words first_high = all(static_cast<std::uint32_t>(first_block >> 32));
  Words c0 = _mm512_add_epi32(first_low, order);
  Words c1 = _mm512_mask_add_epi32(first_high, _mm512_cmplt_epu32_mask(c0, first_low), first_high, all(1));
  Words c2 = all(key.tensor), c3 = all(key.step);
  auto key0 = static_cast<std::uint32_t>(key.seed), key1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Product p0 = multiply(c0, kPhiloxMultiplier0), p1 = multiply(c2, kPhiloxMultiplier1);
    c0 = _mm512_xor_si512(_mm512_xor_si512(p1.high, c1), all(key0));
    c1 = p1.low;
    c2 = _mm512_xor_si512(_mm512_xor_si512(p0.high, c3), all(key1));
    c3 = p0.low;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const Words low01 = _mm512_unpacklo_epi32(c0, c1), high01 = _mm512_unpackhi_epi32(c0, c1);
  const Words low23 = _mm512_unpacklo_epi32(c2, c3), high23 = _mm512_unpackhi_epi32(c2, c3);
  return {{_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
           _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)}};
}

template <Format format>
void cast_stochastic(const float* values, void* codes, std::size_t count, SpecialResults special,
                     const StochasticStream& stream) {
  auto* out = static_cast<Code<format>*>(codes);
  const auto by_twin = [&](std::size_t begin, std::size_t end) {
    kTwin<format>.stochastic(values + begin, out + begin, end - begin, special,
                             {stream.key, stream.first_element + begin});
  };
  // Up to the first element that begins a Philox block.
  const std::size_t to_block = (4 - stream.first_element % 4) % 4;
  std::size_t i = to_block < count ? to_block : count;
  by_twin(0, i);
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    const RandomWords random = random_words(stream.key, (stream.first_element + i) / 4);
    for (std::size_t v = 0; v < 4; ++v)
      store_codes<format>(out + i + v * kWidth,
                          cast_words<format, Rounding::Stochastic>(
                              _mm512_loadu_si512(values + i + v * kWidth), special, random.of_vector[v]));
  }
  by_twin(i, count);
}

void random(const StochasticStream& stream, std::uint32_t* words, std::size_t count) {
  const auto by_twin = [&](std::size_t begin, std::size_t end) {
    kScalarKernels.random({stream.key, stream.first_element + begin}, words + begin, end - begin);
  };
  const std::size_t to_block = (4 - stream.first_element % 4) % 4;
  std::size_t i = to_block < count ? to_block : count;
  by_twin(0, i);
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    const RandomWords random = random_words(stream.key, (stream.first_element + i) / 4);
    for (std::size_t v = 0; v < 4; ++v) _mm512_storeu_si512(words + i + v * kWidth, random.of_vector[v]);
  }
  by_twin(i, count);
}

template <Format format>
Words decode_words(Words codes) {
  constexpr CastConstants k = cast_constants(format);
  const Words sign = _mm512_slli_epi32(_mm512_srli_epi32(codes, k.sign_position), 31);
  const Words magnitude =
      _mm512_srli_epi32(_mm512_and_si512(codes, all((1u << k.sign_position) - 1)), k.unused_low_bits);
  Words value = _mm512_slli_epi32(magnitude, 23 - k.mantissa_bits);
  if constexpr (k.bias != 127) {
    value = _mm512_add_epi32(value, all((127u - k.bias) << 23));
    const __mmask16 subnormal = _mm512_cmplt_epu32_mask(magnitude, all(1u << k.mantissa_bits));
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(k.min_subnormal));
    value = _mm512_mask_mov_epi32(value, subnormal, _mm512_castps_si512(product));
  }
  value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epu32_mask(magnitude, all(k.inf_code)), all(kFp32Inf));
  value = _mm512_mask_mov_epi32(value, _mm512_cmpge_epu32_mask(magnitude, all(k.first_nan_magnitude)),
                                all(kFp32QuietNan));
  value = _mm512_or_si512(value, sign);
  if constexpr (k.minus_zero_is_nan)
    value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epu32_mask(value, all(kFp32Sign)), all(kFp32QuietNan));
  return value;
}

template <Format format>
void decode(const void* codes, float* values, std::size_t count) {
  const auto* in = static_cast<const Code<format>*>(codes);
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    _mm512_storeu_si512(values + i, decode_words<format>(load_codes<format>(in + i)));
  kTwin<format>.decode(in + i, values + i, count - i);
}

template <Format format>
constexpr FormatKernels kernels_of() {
  return {cast<format, Rounding::NearestEven>, cast<format, Rounding::TowardZero>, cast_stochastic<format>,
          decode<format>};
}

constexpr KernelTable table_of(const char* isa, const AttentionLoops& attention,
                               const ProductLoops* product) {
  return {
      .isa = isa,
      .format = {{},
                 kernels_of<Format::TF32>(),
                 kernels_of<Format::BF16>(),
                 kernels_of<Format::FP16>(),
                 kernels_of<Format::E4M3>(),
                 kernels_of<Format::E5M2>(),
                 kernels_of<Format::E4M3FNUZ>(),
                 kernels_of<Format::E5M2FNUZ>(),
                 {},
                 kernels_of<Format::E2M1>()},
      .random = random,
      .update = &kAvx512UpdateStages,
      .norm = &kAvx512NormRows,
      .pointwise = &kAvx512Pointwise,
      .quantise = &kAvx512QuantiseRows,
      .statistics = &kAvx512Statistics,
      .attention = &attention,
      .product = product,
  };
}

}  // namespace

constinit const KernelTable kAvx512Kernels = table_of("avx512", kAvx512Attention, /*product=*/nullptr);
constinit const KernelTable kAmxKernels = table_of("amx", kAmxAttention, &kAmxProduct);

}  // namespace halfstep
