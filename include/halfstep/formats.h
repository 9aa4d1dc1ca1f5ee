// The number formats: what each one can hold, and the exact casts in and out of FP32.
//
// Everything here handles one value at a time and is exact; it is what the fast kernels are checked against.
// docs/formats.md is the long form, with the rules and their reasons.
#pragma once

#include <halfstep/config.h>

#include <cstdint>

namespace halfstep {

/// A number format. `traits` says what each can hold.
enum class Format : std::uint8_t {
  FP32,
  TF32,      ///< FP32's exponent, 10 bits of mantissa, stored in an FP32 word
  BF16,      ///< FP32's exponent, 7 bits of mantissa
  FP16,      ///< IEEE 754 binary16
  E4M3,      ///< OCP FP8: no Inf, one NaN, max 448 (elsewhere "e4m3fn")
  E5M2,      ///< OCP FP8: IEEE-like
  E4M3FNUZ,  ///< no Inf, no -0; the code of -0 is the NaN
  E5M2FNUZ,
  E8M0,  ///< OCP MX block scale: a power of two, neither sign nor zero
  E2M1,  ///< OCP FP4: no Inf, no NaN
};

/// Which codes of a format are not finite numbers.
enum class SpecialCodes : std::uint8_t {
  Ieee,       ///< highest exponent: Inf, and NaN above it
  AllOnes,    ///< all bits but the sign set: the NaN (E8M0: all bits)
  MinusZero,  ///< the code of -0: the NaN
  None,
};

/// What a format can hold. Values are doubles, in which all of them are exact; codes are right-aligned.
struct FormatTraits {
  const char* name = "";
  int bits = 0;  ///< of a stored code. TF32: 32, the low 13 zero. E2M1: 4, one code to a byte until packed.
  int exponent_bits = 0;
  int mantissa_bits = 0;  ///< without the hidden one
  int bias = 0;
  SpecialCodes special = SpecialCodes::None;
  bool has_sign = true;
  bool has_signed_zero = true;
  bool has_inf = false;
  bool has_nan = false;
  double max = 0;  ///< largest finite value
  double min_normal = 0;
  double min_subnormal = 0;  ///< E8M0 has no subnormals: its smallest value, as min_normal
  double epsilon = 0;        ///< from 1 to the next value
  std::uint32_t max_code = 0;
  std::uint32_t inf_code = 0;  ///< of +Inf, where has_inf
  std::uint32_t nan_code = 0;  ///< of the NaN that a cast writes for a positive NaN, where has_nan
  int nan_code_count = 0;      ///< how many codes mean NaN, both signs together
};

namespace detail {

constexpr double power_of_two(int exponent) {
  double result = 1;
  for (; exponent > 0; --exponent) result *= 2;
  for (; exponent < 0; ++exponent) result /= 2;
  return result;
}

/// Everything that follows from the widths, the bias and the special codes.
constexpr FormatTraits derive_traits(const char* name, int bits, int exponent_bits, int mantissa_bits,
                                     int bias, SpecialCodes special, bool has_sign = true) {
  FormatTraits t{name, bits, exponent_bits, mantissa_bits, bias, special, has_sign};
  const int unused_low_bits = bits - int{has_sign} - exponent_bits - mantissa_bits;
  const auto code = [&](std::uint32_t exponent_field, std::uint32_t mantissa) {
    return ((exponent_field << mantissa_bits) | mantissa) << unused_low_bits;
  };
  const std::uint32_t top_exponent = (1u << exponent_bits) - 1, top_mantissa = (1u << mantissa_bits) - 1;

  t.has_inf = special == SpecialCodes::Ieee;
  t.has_nan = special != SpecialCodes::None;
  t.has_signed_zero = has_sign && special != SpecialCodes::MinusZero;

  // The largest finite code: one below whatever the special codes take.
  std::uint32_t max_exponent = top_exponent, max_mantissa = top_mantissa;
  if (special == SpecialCodes::Ieee) {
    max_exponent -= 1;
    t.inf_code = code(top_exponent, 0);
    t.nan_code = code(top_exponent, 1u << (mantissa_bits - 1));  // quiet, no payload
    t.nan_code_count = 2 * static_cast<int>(((top_mantissa + 1) << unused_low_bits) - 1);
  } else if (special == SpecialCodes::AllOnes) {
    if (mantissa_bits > 0) {
      max_mantissa -= 1;
    } else {
      max_exponent -= 1;
    }
    t.nan_code = code(top_exponent, top_mantissa);
    t.nan_code_count = has_sign ? 2 : 1;
  } else if (special == SpecialCodes::MinusZero) {
    t.nan_code = 1u << (bits - 1);
    t.nan_code_count = 1;
  }
  t.max_code = code(max_exponent, max_mantissa);

  t.epsilon = power_of_two(-mantissa_bits);
  t.max = power_of_two(static_cast<int>(max_exponent) - bias) * (1 + max_mantissa * t.epsilon);
  const int min_exponent = has_sign ? 1 - bias : -bias;  // E8M0 spends no exponent on zero and subnormals
  t.min_normal = power_of_two(min_exponent);
  t.min_subnormal = t.min_normal * t.epsilon;
  return t;
}

inline constexpr FormatTraits kTraits[] = {
    derive_traits("FP32", 32, 8, 23, 127, SpecialCodes::Ieee),
    derive_traits("TF32", 32, 8, 10, 127, SpecialCodes::Ieee),
    derive_traits("BF16", 16, 8, 7, 127, SpecialCodes::Ieee),
    derive_traits("FP16", 16, 5, 10, 15, SpecialCodes::Ieee),
    derive_traits("E4M3", 8, 4, 3, 7, SpecialCodes::AllOnes),
    derive_traits("E5M2", 8, 5, 2, 15, SpecialCodes::Ieee),
    derive_traits("E4M3FNUZ", 8, 4, 3, 8, SpecialCodes::MinusZero),
    derive_traits("E5M2FNUZ", 8, 5, 2, 16, SpecialCodes::MinusZero),
    derive_traits("E8M0", 8, 8, 0, 127, SpecialCodes::AllOnes, /*has_sign=*/false),
    derive_traits("E2M1", 4, 2, 1, 1, SpecialCodes::None),
};

}  // namespace detail

inline constexpr int kFormatCount = sizeof(detail::kTraits) / sizeof(detail::kTraits[0]);

/// What a format can hold.
constexpr const FormatTraits& traits(Format format) { return detail::kTraits[static_cast<int>(format)]; }

/// How a cast chooses between the two nearest values.
enum class Rounding : std::uint8_t {
  NearestEven,
  TowardZero,
  Stochastic,  ///< up with the probability of the fraction that is cut off
};

/// What a finite value becomes when it rounds to more than the format's max.
/// Rounding comes first: 464 rounds to 448 in E4M3 and has not overflowed; 465 has.
/// Toward zero nothing finite overflows (IEEE 754, 7.4): it stops at max under either policy.
enum class Overflow : std::uint8_t {
  Saturate,   ///< max
  NonFinite,  ///< Inf; NaN where the format has no Inf; max where it has neither
};

/// What an infinite input becomes.
enum class InfInput : std::uint8_t {
  Saturate,   ///< max. A later finite-check cannot see it: look before the cast.
  NonFinite,  ///< Inf; NaN where the format has no Inf; max where it has neither
};

/// How a cast behaves. By default a large value is held at max, and an Inf stays visible.
///
/// A NaN input becomes the format's quiet NaN without payload, sign kept where the format's NaN has one.
/// E2M1 has no NaN: there a NaN becomes +6, as NVIDIA's conversions do, large enough to be noticed.
struct CastMode {
  Rounding rounding = Rounding::NearestEven;
  Overflow overflow = Overflow::Saturate;
  InfInput inf_input = InfInput::NonFinite;
};

/// Names the random bits of a stochastic cast. With the index of the element they are all that the bits
/// depend on: not threads, vector width, chunking or order. One (tensor, step) pair belongs to one cast.
struct StochasticKey {
  std::uint64_t seed = 0;
  std::uint32_t tensor = 0;
  std::uint32_t step = 0;
};

/// The code of `value`. E8M0 is refused: a block scale is chosen by e8m0_floor or e8m0_ceil. Stochastic
/// rounding is refused: it needs a key, see encode_float_stochastic.
HALFSTEP_API std::uint32_t encode_float(float value, Format format, CastMode mode = {});

/// The code of element number `element` of the tensor that `key` names. `mode.rounding` must be Stochastic.
HALFSTEP_API std::uint32_t encode_float_stochastic(float value, Format format, CastMode mode,
                                                   StochasticKey key, std::uint64_t element);

/// The value of a code, exact. Every NaN code gives FP32's quiet NaN without payload, sign kept where the
/// format's NaN has one. Bits above the format's width are refused.
HALFSTEP_API float decode_float(std::uint32_t code, Format format);

/// The E8M0 code of the largest power of two that is not above `value`, or of the smallest that is not below.
/// Zero and everything below 2^-127 give 2^-127 (code 0); ceil above 2^127 gives 2^127, the largest there is.
/// Negative values, Inf and NaN give NaN (code 255).
HALFSTEP_API std::uint8_t e8m0_floor(float value);
HALFSTEP_API std::uint8_t e8m0_ceil(float value);

}  // namespace halfstep
