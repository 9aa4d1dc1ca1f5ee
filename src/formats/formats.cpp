#include <halfstep/error.h>
#include <halfstep/formats.h>

#include <algorithm>
#include <bit>

#include "formats/philox.h"
#include "formats/reference_cast.h"

namespace halfstep {
namespace {

std::uint32_t encode_bits(std::uint32_t bits, Format format, CastMode mode, std::uint32_t random) {
  switch (format) {
    case Format::FP32:
      return reference_cast<Format::FP32>(bits, mode, random);
    case Format::TF32:
      return reference_cast<Format::TF32>(bits, mode, random);
    case Format::BF16:
      return reference_cast<Format::BF16>(bits, mode, random);
    case Format::FP16:
      return reference_cast<Format::FP16>(bits, mode, random);
    case Format::E4M3:
      return reference_cast<Format::E4M3>(bits, mode, random);
    case Format::E5M2:
      return reference_cast<Format::E5M2>(bits, mode, random);
    case Format::E4M3FNUZ:
      return reference_cast<Format::E4M3FNUZ>(bits, mode, random);
    case Format::E5M2FNUZ:
      return reference_cast<Format::E5M2FNUZ>(bits, mode, random);
    case Format::E2M1:
      return reference_cast<Format::E2M1>(bits, mode, random);
    case Format::E8M0:
      break;
  }
  HALFSTEP_CHECK(
      format != Format::E8M0,
      "encode_float: E8M0 holds block scales, which are chosen rather than rounded. Use e8m0_floor or "
      "e8m0_ceil.");
  HALFSTEP_BUG("encode_float: no format has number ", static_cast<int>(format));
}

}  // namespace

std::uint32_t encode_float(float value, Format format, CastMode mode) {
  HALFSTEP_CHECK(mode.rounding != Rounding::Stochastic,
                 "encode_float: stochastic rounding needs to know whose random bits to use. Call "
                 "encode_float_stochastic with a key and the element's index.");
  return encode_bits(std::bit_cast<std::uint32_t>(value), format, mode, 0);
}

std::uint32_t encode_float_stochastic(float value, Format format, CastMode mode, StochasticKey key,
                                      std::uint64_t element) {
  HALFSTEP_CHECK(mode.rounding == Rounding::Stochastic,
                 "encode_float_stochastic: mode.rounding is not Stochastic. Use encode_float for the other "
                 "roundings.");
  return encode_bits(std::bit_cast<std::uint32_t>(value), format, mode, random_bits(key, element));
}

float decode_float(std::uint32_t code, Format format) {
  const FormatTraits& t = traits(format);
  HALFSTEP_CHECK(t.bits == 32 || code >> t.bits == 0, "decode_float: ", t.name, " has ", t.bits,
                 "-bit codes, got ", code, ".");

  const bool negative = t.has_sign && (code >> (t.bits - 1)) & 1;
  const std::uint32_t sign = negative ? 0x80000000 : 0;
  const std::uint32_t magnitude = t.has_sign ? code & ~(1u << (t.bits - 1)) : code;
  const float nan = std::bit_cast<float>(0x7fc00000 | sign);
  switch (t.special) {
    case SpecialCodes::Ieee:
      if (magnitude > t.inf_code) return nan;
      if (magnitude == t.inf_code) return std::bit_cast<float>(0x7f800000 | sign);
      break;
    case SpecialCodes::AllOnes:
      if (magnitude == t.nan_code) return nan;
      break;
    case SpecialCodes::MinusZero:
      if (code == t.nan_code) return std::bit_cast<float>(0x7fc00000u);
      break;
    case SpecialCodes::None:
      break;
  }

  // With FP32's own exponent a code is the upper end of an FP32 word, subnormals included. They are not
  // computed: an FP32 subnormal is lost where the caller has set flush-to-zero.
  if (format == Format::E8M0) return std::bit_cast<float>(code == 0 ? 0x00400000 : code << 23);
  if (t.exponent_bits == 8) return std::bit_cast<float>(code << (32 - t.bits));

  const int mantissa = static_cast<int>(magnitude) % (1 << t.mantissa_bits);
  const int exponent_field = static_cast<int>(magnitude) >> t.mantissa_bits;
  const double significand = (exponent_field == 0 ? 0 : 1) + mantissa * t.epsilon;
  const double value = significand * detail::exact_power(std::max(exponent_field, 1) - t.bias);
  return static_cast<float>(negative ? -value : value);
}

namespace {

constexpr std::uint8_t kE8m0Nan = 255, kE8m0Max = 254;

/// Zero, or positive and finite: what a block scale can be chosen for.
bool can_be_scaled(std::uint32_t bits) { return bits == 0x80000000 || bits < 0x7f800000; }

}  // namespace

// E8M0 and FP32 share the bias 127, so the exponent field of an FP32 number is the code of its floor. Only
// the FP32 subnormals need a thought: their field is 0, and E8M0's code 0 is 2^-127, in the middle of them.

std::uint8_t e8m0_floor(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return can_be_scaled(bits) ? (bits >> 23) & 0xff : kE8m0Nan;
}

std::uint8_t e8m0_ceil(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (!can_be_scaled(bits)) return kE8m0Nan;
  const std::uint32_t exponent_field = (bits >> 23) & 0xff, fraction = bits & 0x7fffff;
  const std::uint32_t fraction_of_floor = exponent_field == 0 ? 0x400000 : 0;  // 2^-127 as an FP32 subnormal
  return static_cast<std::uint8_t>(
      std::min<std::uint32_t>(exponent_field + (fraction > fraction_of_floor), kE8m0Max));
}

}  // namespace halfstep
