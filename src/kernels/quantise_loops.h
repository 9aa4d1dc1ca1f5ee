// The loops of QuantiseRows, for the compiler to make vectors of. Each ISA's file includes this once; all is
// local to that file, see avx512.cpp for why.
#pragma once

#include <halfstep/recipe.h>

#include <bit>
#include <type_traits>

#include "kernels/cast_constants.h"
#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

inline float loaded(const float* values, std::size_t i) { return values[i]; }
inline float loaded(const std::uint16_t* values, std::size_t i) {
  return std::bit_cast<float>(std::uint32_t{values[i]} << 16);
}

// A BF16 number's magnitude orders as its own 16 bits do: twice as many to a vector.
inline std::uint32_t magnitude_of(float value) { return std::bit_cast<std::uint32_t>(value) & ~kFp32Sign; }
inline std::uint16_t magnitude_of(std::uint16_t code) { return static_cast<std::uint16_t>(code & 0x7fff); }
inline std::uint32_t as_fp32(std::uint32_t magnitude) { return magnitude; }
inline std::uint32_t as_fp32(std::uint16_t magnitude) { return std::uint32_t{magnitude} << 16; }

template <typename Value>
void raise(const void* given, std::uint32_t* __restrict magnitudes, std::size_t count) {
  const auto* __restrict values = static_cast<const Value*>(given);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = as_fp32(magnitude_of(values[i]));
    magnitudes[i] = magnitude > magnitudes[i] ? magnitude : magnitudes[i];
  }
}

template <typename Value>
inline std::uint32_t largest_of(const Value* __restrict values, std::size_t count) {
  decltype(magnitude_of(*values)) found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = magnitude_of(values[i]);
    found = magnitude > found ? magnitude : found;
  }
  return as_fp32(found);
}

template <typename Value>
std::uint32_t largest(const void* given, std::size_t count) {
  return largest_of(static_cast<const Value*>(given), count);
}

/// work(width) with a width that the compiler knows where it is one of the recipes'.
template <typename Work>
inline void with_known_width(std::size_t width, const Work& work) {
  if (width == 16) return work(std::integral_constant<std::size_t, 16>());
  if (width == 32) return work(std::integral_constant<std::size_t, 32>());
  if (width == 128) return work(std::integral_constant<std::size_t, 128>());
  work(width);
}

template <typename Value>
void largest_of_blocks(const void* given, std::size_t any_width, std::size_t blocks,
                       std::uint32_t* __restrict found) {
  const auto* __restrict values = static_cast<const Value*>(given);
  with_known_width(any_width, [&](auto width) {
    for (std::size_t block = 0; block < blocks; ++block)
      found[block] = largest_of(values + block * width, width);
  });
}

void spread(const float* __restrict of_blocks, std::size_t any_width, std::size_t blocks,
            float* __restrict factors) {
  with_known_width(any_width, [&](auto width) {
    for (std::size_t block = 0; block < blocks; ++block)
      for (std::size_t i = 0; i < width; ++i) factors[block * width + i] = of_blocks[block];
  });
}

/// Every choice is one between two numbers, so that the compiler finds no branch.
template <ScaleRule rule>
void scale_blocks(const std::uint32_t* __restrict magnitudes, std::size_t count, const ScaleConstants& given,
                  void* stored, float* __restrict encodes) {
  const ScaleConstants k =
      given;  // a copy: what is written could lie in the other, for all the compiler knows
  auto* __restrict floats = static_cast<float*>(stored);
  auto* __restrict codes = static_cast<std::uint8_t*>(stored);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = magnitudes[i];
    const bool finite = magnitude < kFp32Inf;
    const float amax = std::bit_cast<float>(finite ? magnitude : 0u);
    if constexpr (rule == ScaleRule::Unscaled) {
      encodes[i] = floats[i] = 1;
    } else if constexpr (rule == ScaleRule::Fp32 || rule == ScaleRule::PowerOfTwo) {
      const double held = double{amax} > kLeastAmax ? double{amax} : kLeastAmax;
      const auto scale = static_cast<float>(k.max / held);
      const auto power = std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) & kFp32Inf);
      // What is not finite keeps a code of its own; its neighbours keep theirs.
      const float encode = finite ? (rule == ScaleRule::Fp32 ? scale : power) : 1.0f;
      encodes[i] = encode;
      floats[i] = 1 / encode;
    } else if constexpr (rule == ScaleRule::E8m0Floor || rule == ScaleRule::E8m0Ceil) {
      std::uint32_t code;
      if constexpr (rule == ScaleRule::E8m0Floor) {
        const auto exponent = static_cast<std::int32_t>(magnitude >> 23) - k.largest_exponent;
        code = static_cast<std::uint32_t>(exponent > 0 ? exponent : 0);
      } else {
        // e8m0_ceil(amax / max) without the quotient, which may lie below the normal numbers.
        const std::uint32_t fraction = magnitude & 0x7fffff;
        const auto exponent =
            static_cast<std::int32_t>((magnitude >> 23) + (fraction > k.max_fraction ? 1u : 0u)) -
            k.largest_exponent;
        code = static_cast<std::uint32_t>(exponent > 0 ? exponent : 0);
      }
      // 2^(127 - code), which below the normal numbers is one bit less.
      const std::uint32_t encode = code == 254 ? 1u << 22 : (254 - code) << 23;
      encodes[i] = std::bit_cast<float>(finite ? encode : std::bit_cast<std::uint32_t>(1.0f));
      codes[i] = static_cast<std::uint8_t>(finite ? code : 255u);  // NaN
    } else {
      static_assert(rule == ScaleRule::E4m3);
      constexpr CastConstants e4m3 = cast_constants(Format::E4M3);
      constexpr auto kMax = static_cast<float>(traits(Format::E4M3).max);
      constexpr auto kMinNormal = static_cast<float>(traits(Format::E4M3).min_normal);
      constexpr auto kMostOfCodes = static_cast<float>(traits(Format::E2M1).max);
      // Between min_normal and max, where rounding to nearest even is that of a whole number of 20 bits
      // fewer.
      float wanted = amax / kMostOfCodes / k.tensor_scale;
      wanted = wanted > kMinNormal ? wanted : kMinNormal;
      wanted = wanted < kMax ? wanted : kMax;
      const auto bits = std::bit_cast<std::uint32_t>(wanted);
      const std::uint32_t rounded = (bits + 0x7ffff + ((bits >> 20) & 1)) >> 20;
      encodes[i] = finite ? k.tensor_encode / std::bit_cast<float>(rounded << 20) : 1.0f;
      codes[i] = static_cast<std::uint8_t>(finite ? rounded - ((127u - e4m3.bias) << 3) : e4m3.nan_code);
    }
  }
}

/// Codes of values * factors. Adding a power of two whose neighbours are as far apart as the format's are
/// around the value rounds it, to nearest even; what the sum has more than that power is a whole number of
/// such distances. Sums without a branch, so that the compiler makes vectors of all of it. `all_finite` are
/// the values, not the products.
template <Format format, typename Value, bool all_finite>
void encode(const void* given, const float* __restrict factors, std::uint8_t* __restrict codes,
            std::size_t count, std::uint32_t* counts) {
  constexpr CastConstants k = cast_constants(format);
  constexpr std::uint32_t kDropped = 23 - k.mantissa_bits;
  constexpr std::uint32_t kFirstNormal = k.first_normal << 23;
  constexpr std::uint32_t kMax = (k.max_code + ((k.first_normal - 1) << k.mantissa_bits)) << kDropped;
  // From half a unit above max on; on the half itself only where an odd code rounds up.
  constexpr std::uint32_t kSaturates = kMax + (1u << (kDropped - 1)) + (k.max_code % 2 == 0 ? 1 : 0);
  // What a format has no code for is held at max: its block's scale tells.
  constexpr std::uint32_t kInf = k.inf_code < k.nan_code ? k.inf_code : k.nan_code;
  const auto* __restrict values = static_cast<const Value*>(given);
  std::uint32_t saturated = 0, vanished = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = loaded(values, i);
    const auto bits = std::bit_cast<std::uint32_t>(value * factors[i]);

    const std::uint32_t magnitude = bits & ~kFp32Sign;
    const std::uint32_t held = magnitude < kMax ? magnitude : kMax;
    const std::uint32_t exponent = held & kFp32Inf;
    const std::uint32_t unit = exponent > kFirstNormal ? exponent : kFirstNormal;
    const std::uint32_t power = unit + (kDropped << 23);
    const auto sum = std::bit_cast<std::uint32_t>(std::bit_cast<float>(held) + std::bit_cast<float>(power));
    std::uint32_t code = sum - power + ((unit - kFirstNormal) >> kDropped);
    saturated += std::uint32_t{magnitude >= kSaturates};
    vanished += std::uint32_t{code == 0} - std::uint32_t{magnitude_of(value) == 0};
    if constexpr (!all_finite) {
      const std::uint32_t given_magnitude = magnitude_of(value);
      saturated -= std::uint32_t{given_magnitude >= kFp32Inf};
      code = given_magnitude >= kFp32Inf ? kInf : code;
      code = given_magnitude > kFp32Inf ? k.nan_code : code;
    }

    codes[i] = static_cast<std::uint8_t>(code | ((bits >> 31) << k.sign_position));
  }
  counts[0] += saturated;
  counts[1] += vanished;
}

template <Format format>
inline float value_of(std::uint32_t code) {
  constexpr CastConstants k = cast_constants(format);
  const std::uint32_t magnitude = code & ((1u << k.sign_position) - 1);
  const std::uint32_t normal = (magnitude << (23 - k.mantissa_bits)) + ((127u - k.bias) << 23);
  const auto subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(magnitude)) * k.min_subnormal);
  std::uint32_t bits = magnitude < (1u << k.mantissa_bits) ? subnormal : normal;
  bits = magnitude == k.inf_code ? kFp32Inf : bits;
  bits = magnitude >= k.first_nan_magnitude ? kFp32QuietNan : bits;
  return std::bit_cast<float>(bits | ((code >> k.sign_position) << 31));
}

inline void store(float* output, float value) { *output = value; }
inline void store(std::uint16_t* output, float value) {
  *output = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

template <Format format, typename Output>
void decode(const std::uint8_t* __restrict codes, const float* __restrict factors, void* given,
            std::size_t count) {
  auto* __restrict output = static_cast<Output*>(given);
  for (std::size_t i = 0; i < count; ++i) store(output + i, value_of<format>(codes[i]) * factors[i]);
}

template <Format format>
constexpr QuantiseRows::OfFormat rows_of() {
  return {.encode = {encode<format, float, false>, encode<format, std::uint16_t, false>},
          .encode_finite = {encode<format, float, true>, encode<format, std::uint16_t, true>},
          .decode = {decode<format, float>, decode<format, std::uint16_t>}};
}

constexpr QuantiseRows kRows = {
    .raise = {raise<float>, raise<std::uint16_t>},
    .largest = {largest<float>, largest<std::uint16_t>},
    .largest_of_blocks = {largest_of_blocks<float>, largest_of_blocks<std::uint16_t>},
    .spread = spread,
    .scale_blocks = {scale_blocks<ScaleRule::Fp32>, scale_blocks<ScaleRule::PowerOfTwo>,
                     scale_blocks<ScaleRule::E8m0Floor>, scale_blocks<ScaleRule::E8m0Ceil>,
                     scale_blocks<ScaleRule::Unscaled>, scale_blocks<ScaleRule::E4m3>},
    .of_format = {rows_of<Format::E4M3>(), rows_of<Format::E5M2>(), rows_of<Format::E2M1>()}};

}  // namespace
}  // namespace halfstep
