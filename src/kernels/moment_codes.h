// The 8-bit codes of blockwise moments: small floating-point numbers, multiplied by the scale of their block.
// Compile-time only, like cast_constants.h.
//
// Exponent field 15 is [scale, 2 * scale); each lower one halves, and field 0 continues evenly to zero as
// IEEE subnormals do. The first moment has a sign, 4 exponent bits and 3 mantissa bits, the second 4 and 4
// and no sign. The scale is the power of two for which the block's largest magnitude still has a code, so
// nothing saturates, and codes mean the same value from step to step while the largest stays in its binade.
#pragma once

#include <cstdint>

namespace halfstep {

struct MomentCodes {
  int mantissa_bits;
  bool has_sign;
  // A second moment that is not 0 does not become 0: its weight would be divided by eps alone.
  std::uint32_t smallest_of_nonzero;
};

inline constexpr MomentCodes kMomentCodes[2] = {
    {.mantissa_bits = 3, .has_sign = true, .smallest_of_nonzero = 0},
    {.mantissa_bits = 4, .has_sign = false, .smallest_of_nonzero = 1},
};

inline constexpr std::uint32_t kTopMomentExponent = 15;

/// FP32's exponent field of the smallest scale: the codes' own normal binades are then normal in FP32 too.
inline constexpr std::uint32_t kMinScaleExponent = kTopMomentExponent;
/// And of the largest, 2^127. Only there can a magnitude lie above the largest code, and stops at it.
inline constexpr std::uint32_t kMaxScaleExponent = 254;

/// The significand field above which rounding up could leave the binade, and the scale is doubled.
constexpr std::uint32_t largest_fraction(MomentCodes codes) {
  return ((1u << codes.mantissa_bits) - 1) << (23 - codes.mantissa_bits);
}

/// The largest code, sign left out.
constexpr std::uint32_t largest_moment_code(MomentCodes codes) {
  return ((kTopMomentExponent + 1) << codes.mantissa_bits) - 1;
}

/// Value of the smallest code in units of the scale.
constexpr float smallest_moment(MomentCodes codes) {
  return 0x1p-14f / static_cast<float>(1 << codes.mantissa_bits);
}

/// Golden-ratio steps: over successive optimizer steps an element's dither visits its circle evenly.
inline constexpr std::uint32_t kDitherStep = 0x9E3779B9;

}  // namespace halfstep
