// AVX2. Same functions, same order, same arithmetic as scalar.cpp, 8 elements at a time.
// Includes almost nothing, and everything is local to this file: code compiled for AVX2 must not become the
// one copy of an inline function that the linker keeps for everybody.
#include <immintrin.h>

#include "formats/philox.h"
#include "kernels/cast_constants.h"
#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

constexpr std::size_t kWidth = 8;
using Words = __m256i;  // 8 lanes of 32 bits; as a condition, a lane is all ones or all zeros

Words all(std::uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }

Words choose(Words otherwise, Words condition, Words then) {
  return _mm256_blendv_epi8(otherwise, then, condition);
}

/// Compares as signed numbers, which magnitudes, exponents and codes may be: all are below 2^31.
Words greater(Words a, Words b) { return _mm256_cmpgt_epi32(a, b); }

/// One where a sum of unsigned numbers has wrapped around, else zero.
Words carry_of(Words sum, Words summand) {
  const Words not_wrapped = _mm256_cmpeq_epi32(_mm256_max_epu32(sum, summand), sum);
  return _mm256_add_epi32(not_wrapped, all(1));
}

Words load_words(const void* words) { return _mm256_loadu_si256(static_cast<const __m256i*>(words)); }

template <Format format>
Words load_codes(const Code<format>* codes) {
  if constexpr (sizeof(Code<format>) == 1) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  } else if constexpr (sizeof(Code<format>) == 2) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  } else {
    return load_words(codes);
  }
}

template <Format format>
void store_codes(Code<format>* codes, Words words) {
  if constexpr (sizeof(Code<format>) == 4) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), words);
  } else {
    // Each code fits 16 bits, so packing does not saturate.
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    auto* out = reinterpret_cast<__m128i*>(codes);
    if constexpr (sizeof(Code<format>) == 2) {
      _mm_storeu_si128(out, halves);
    } else {
      _mm_storel_epi64(out, _mm_packus_epi16(halves, halves));
    }
  }
}

template <Format format, Rounding rounding>
Words cast_words(Words bits, SpecialResults special, Words random) {
  constexpr CastConstants k = cast_constants(format);
  const Words magnitude = _mm256_and_si256(bits, all(~kFp32Sign));
  const Words fraction_field = _mm256_and_si256(bits, all(kFp32HiddenBit - 1));
  const Words normal = greater(magnitude, all(kFp32HiddenBit - 1));
  const Words significand = _mm256_or_si256(fraction_field, _mm256_and_si256(normal, all(kFp32HiddenBit)));
  const Words exponent = _mm256_max_epi32(_mm256_srli_epi32(magnitude, 23), all(1));

  // Shifts by 32 and more, and by "negative" counts, give 0: the two halves of the 32.32 number need no
  // branch.
  const Words coarse_exponent = _mm256_max_epi32(exponent, all(k.first_normal));
  const Words shift =
      _mm256_add_epi32(_mm256_sub_epi32(coarse_exponent, exponent), all(23 - k.mantissa_bits));
  const Words steps = _mm256_srlv_epi32(significand, shift);
  Words fraction = _mm256_sllv_epi32(significand, _mm256_sub_epi32(all(32), shift));
  // A fraction that begins below its highest bits is far from one half, and matters to random rounding alone.
  if constexpr (rounding == Rounding::Stochastic)
    fraction = _mm256_or_si256(fraction, _mm256_srlv_epi32(significand, _mm256_sub_epi32(shift, all(32))));
  Words rounded = steps;
  if constexpr (rounding != Rounding::TowardZero) {
    const Words odd = _mm256_and_si256(steps, all(1));
    const Words addend = rounding == Rounding::Stochastic ? random : _mm256_add_epi32(odd, all(0x7fffffff));
    rounded = _mm256_add_epi32(steps, carry_of(_mm256_add_epi32(fraction, addend), fraction));
  }
  Words code = _mm256_add_epi32(
      rounded, _mm256_slli_epi32(_mm256_sub_epi32(coarse_exponent, all(k.first_normal)), k.mantissa_bits));

  code = choose(code, greater(code, all(k.max_code)), all(special.overflow));
  code = choose(code, _mm256_cmpeq_epi32(magnitude, all(kFp32Inf)), all(special.inf));
  const Words nan = greater(magnitude, all(kFp32Inf));
  code = choose(code, nan, all(k.nan_code));

  Words sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), k.sign_position);
  if constexpr (k.minus_zero_is_nan) sign = _mm256_andnot_si256(_mm256_cmpeq_epi32(code, all(0)), sign);
  if constexpr (!k.has_nan) sign = _mm256_andnot_si256(nan, sign);
  return _mm256_or_si256(_mm256_slli_epi32(code, k.unused_low_bits), sign);
}

/// Does what is left when the vectors are full.
template <Format format>
constexpr const FormatKernels& kTwin = kScalarKernels.format[static_cast<int>(format)];

template <Format format, Rounding rounding>
void cast(const float* values, void* codes, std::size_t count, SpecialResults special) {
  auto* out = static_cast<Code<format>*>(codes);
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    store_codes<format>(out + i, cast_words<format, rounding>(load_words(values + i), special, all(0)));
  constexpr bool nearest = rounding == Rounding::NearestEven;
  (nearest ? kTwin<format>.nearest_even : kTwin<format>.toward_zero)(values + i, out + i, count - i, special);
}

struct Product {
  Words high, low;
};

Product multiply(Words lanes, std::uint32_t factor) {
  const Words even = _mm256_mul_epu32(lanes, all(factor));
  const Words odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), all(factor));
  return {_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
          _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
}

struct RandomWords {
  Words of_vector[4];
};

/// The random bits of the 32 elements from 4 * first_block on.
RandomWords random_words(StochasticKey key, std::uint64_t first_block) {
  // A block makes four neighbouring words, a vector of blocks four vectors of one word each. With the blocks
  // dealt out in this order, the 4x4 transpositions inside 128-bit lanes below put every word in its place.
  const Words order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const Words first_low = all(static_cast<std::uint32_t>(first_block));
  const Words first_high = all(static_cast<std::uint32_t>(first_block >> 32));
  Words c0 = _mm256_add_epi32(first_low, order);
  Words c1 = _mm256_add_epi32(first_high, carry_of(c0, first_low));
  Words c2 = all(key.tensor), c3 = all(key.step);
  auto key0 = static_cast<std::uint32_t>(key.seed), key1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Product p0 = multiply(c0, kPhiloxMultiplier0), p1 = multiply(c2, kPhiloxMultiplier1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(p1.high, c1), all(key0));
    c1 = p1.low;
    c2 = _mm256_xor_si256(_mm256_xor_si256(p0.high, c3), all(key1));
    c3 = p0.low;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const Words low01 = _mm256_unpacklo_epi32(c0, c1), high01 = _mm256_unpackhi_epi32(c0, c1);
  const Words low23 = _mm256_unpacklo_epi32(c2, c3), high23 = _mm256_unpackhi_epi32(c2, c3);
  return {{_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
           _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)}};
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
                          cast_words<format, Rounding::Stochastic>(load_words(values + i + v * kWidth),
                                                                   special, random.of_vector[v]));
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
    for (std::size_t v = 0; v < 4; ++v)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i + v * kWidth), random.of_vector[v]);
  }
  by_twin(i, count);
}

template <Format format>
Words decode_words(Words codes) {
  constexpr CastConstants k = cast_constants(format);
  const Words sign = _mm256_slli_epi32(_mm256_srli_epi32(codes, k.sign_position), 31);
  const Words magnitude =
      _mm256_srli_epi32(_mm256_and_si256(codes, all((1u << k.sign_position) - 1)), k.unused_low_bits);
  Words value = _mm256_slli_epi32(magnitude, 23 - k.mantissa_bits);
  if constexpr (k.bias != 127) {
    value = _mm256_add_epi32(value, all((127u - k.bias) << 23));
    const Words subnormal = greater(all(1u << k.mantissa_bits), magnitude);
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(k.min_subnormal));
    value = choose(value, subnormal, _mm256_castps_si256(product));
  }
  value = choose(value, _mm256_cmpeq_epi32(magnitude, all(k.inf_code)), all(kFp32Inf));
  value = choose(value, greater(magnitude, all(k.first_nan_magnitude - 1)), all(kFp32QuietNan));
  value = _mm256_or_si256(value, sign);
  if constexpr (k.minus_zero_is_nan)
    value = choose(value, _mm256_cmpeq_epi32(value, all(kFp32Sign)), all(kFp32QuietNan));
  return value;
}

template <Format format>
void decode(const void* codes, float* values, std::size_t count) {
  const auto* in = static_cast<const Code<format>*>(codes);
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i),
                        decode_words<format>(load_codes<format>(in + i)));
  kTwin<format>.decode(in + i, values + i, count - i);
}

template <Format format>
constexpr FormatKernels kernels_of() {
  return {cast<format, Rounding::NearestEven>, cast<format, Rounding::TowardZero>, cast_stochastic<format>,
          decode<format>};
}

}  // namespace

constinit const KernelTable kAvx2Kernels = {
    .isa = "avx2",
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
    .update = &kAvx2UpdateStages,
    .norm = &kAvx2NormRows,
    .pointwise = &kAvx2Pointwise,
    .quantise = &kAvx2QuantiseRows,
    .statistics = &kAvx2Statistics,
    .attention = &kAvx2Attention,
};

}  // namespace halfstep
