// A format as the cast kernels see it. Compile-time only: no function here ever becomes code, so none can be
// shared between files that are compiled for different ISAs.
#pragma once

#include <halfstep/formats.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace halfstep {

/// FP32's fields.
inline constexpr std::uint32_t kFp32Inf = 0x7f800000, kFp32QuietNan = 0x7fc00000, kFp32Sign = 0x80000000,
                               kFp32HiddenBit = 0x00800000;

struct CastConstants {
  int mantissa_bits;
  int bias;
  int sign_position;
  int unused_low_bits;         // TF32's 13; the other constants are without them
  std::uint32_t first_normal;  // FP32's exponent field of the format's min_normal
  std::uint32_t max_code;
  std::uint32_t inf_code;             // above every code where there is no Inf
  std::uint32_t first_nan_magnitude;  // codes from here on, sign taken off, are NaN
  std::uint32_t nan_code;             // what a NaN becomes: max where there is no NaN
  bool has_nan;
  bool minus_zero_is_nan;
  float min_subnormal;
};

consteval CastConstants cast_constants(Format format) {
  const FormatTraits t = traits(format);
  const int unused = t.bits - 1 - t.exponent_bits - t.mantissa_bits;
  const std::uint32_t never = 1u << (t.bits - 1 - unused);
  const std::uint32_t inf_code = t.has_inf ? t.inf_code >> unused : never;
  return {.mantissa_bits = t.mantissa_bits,
          .bias = t.bias,
          .sign_position = t.bits - 1,
          .unused_low_bits = unused,
          .first_normal = static_cast<std::uint32_t>(127 - t.bias + 1),
          .max_code = t.max_code >> unused,
          .inf_code = inf_code,
          .first_nan_magnitude = t.special == SpecialCodes::Ieee      ? inf_code + 1
                                 : t.special == SpecialCodes::AllOnes ? t.nan_code
                                                                      : never,
          .nan_code = (t.has_nan ? t.nan_code : t.max_code) >> unused,
          .has_nan = t.has_nan,
          .minus_zero_is_nan = t.special == SpecialCodes::MinusZero,
          .min_subnormal = static_cast<float>(t.min_subnormal)};
}

template <Format format>
using Code = std::conditional_t<traits(format).bits <= 8, std::uint8_t,
                                std::conditional_t<traits(format).bits <= 16, std::uint16_t, std::uint32_t>>;

}  // namespace halfstep
