// The reference cast: from the definition of the format, in exact arithmetic, one value at a time.
//
// It shares nothing with the kernels, which shift integers: here the value is divided by the distance of its
// neighbours and rounded as a number. Every double below is exact, because FP32 values, the codes' values and
// the powers of two between them all fit with bits to spare; none is subnormal, so FTZ and DAZ do not matter.
#pragma once

#include <halfstep/formats.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace halfstep {

namespace detail {

inline constexpr int kLargestPower = 160;  // FP32 and the quotients of its values span 2^-149 to 2^127

inline constexpr auto kPowersOfTwo = [] {
  std::array<double, 2 * kLargestPower + 1> powers{};
  for (int e = -kLargestPower; e <= kLargestPower; ++e) powers[e + kLargestPower] = power_of_two(e);
  return powers;
}();

constexpr double exact_power(int exponent) { return kPowersOfTwo[exponent + kLargestPower]; }

/// |x| = significand * 2^exponent, read from the fields of FP32.
struct Fp32Magnitude {
  int significand;
  int exponent;
};

constexpr Fp32Magnitude fp32_magnitude(std::uint32_t bits) {
  const int exponent_field = (bits >> 23) & 0xff, fraction = bits & 0x7fffff;
  if (exponent_field == 0) return {fraction, -149};
  return {fraction + (1 << 23), exponent_field - 127 - 23};
}

constexpr bool rounds_up(int below, double fraction, Rounding rounding, std::uint32_t random) {
  switch (rounding) {
    case Rounding::NearestEven:
      return fraction > 0.5 || (fraction == 0.5 && (below & 1));
    case Rounding::TowardZero:
      return false;
    case Rounding::Stochastic:
      // The fraction counted in units of 2^-32, what is smaller cut off; up for that many of 2^32 draws.
      return static_cast<std::uint64_t>(fraction * 0x1p32) + random >= std::uint64_t{1} << 32;
  }
  return false;
}

}  // namespace detail

/// The code of the FP32 number with these bits. `random` matters to stochastic rounding alone.
template <Format format>
constexpr std::uint32_t reference_cast(std::uint32_t fp32_bits, CastMode mode, std::uint32_t random = 0) {
  static_assert(format != Format::E8M0, "block scales are chosen by exponent arithmetic, see e8m0_floor");
  constexpr FormatTraits t = traits(format);
  constexpr int unused_low_bits = t.bits - 1 - t.exponent_bits - t.mantissa_bits;
  constexpr std::uint32_t sign_bit = 1u << (t.bits - 1);
  constexpr std::uint32_t non_finite = t.has_inf ? t.inf_code : t.has_nan ? t.nan_code : t.max_code;
  const std::uint32_t sign = fp32_bits >> 31 ? sign_bit : 0;
  const std::uint32_t magnitude_bits = fp32_bits & 0x7fffffff;

  if (magnitude_bits > 0x7f800000) return t.has_nan ? t.nan_code | sign : t.max_code;
  if (magnitude_bits == 0x7f800000)
    return (mode.inf_input == InfInput::Saturate ? t.max_code : non_finite) | sign;

  // Neighbours in the format are 2^step_exponent apart around this value; below min_normal they come no
  // closer.
  const detail::Fp32Magnitude x = detail::fp32_magnitude(fp32_bits);
  const int binade = std::max(x.exponent + 23, 1 - t.bias);
  const int step_exponent = binade - t.mantissa_bits;
  const double steps = x.significand * detail::exact_power(x.exponent - step_exponent);
  const int below = static_cast<int>(steps);
  const int rounded = below + detail::rounds_up(below, steps - below, mode.rounding, random);

  if (rounded * detail::exact_power(step_exponent) > t.max) {
    const bool saturate = mode.overflow == Overflow::Saturate || mode.rounding == Rounding::TowardZero;
    return (saturate ? t.max_code : non_finite) | sign;
  }
  if (rounded == 0) return t.has_signed_zero ? sign : 0;

  // Fields from the number: a normal one has its hidden bit set; rounding may have carried into the next
  // binade.
  constexpr int hidden_bit = 1 << t.mantissa_bits;
  const bool carried = rounded == 2 * hidden_bit;
  const int significand = carried ? hidden_bit : rounded;
  const int exponent_field = significand < hidden_bit ? 0 : binade + carried + t.bias;
  const int mantissa = significand % hidden_bit;
  return static_cast<std::uint32_t>(exponent_field * hidden_bit + mantissa) << unused_low_bits | sign;
}

}  // namespace halfstep
