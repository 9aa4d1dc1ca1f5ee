#include "formats/spec_oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace halfstep::oracle {

const std::vector<Spec>& specs() {
  // clang-format off
  static const std::vector<Spec> all = {
      // format, name, bits, exponent, mantissa, bias, max, min normal, min subnormal, epsilon, Inf, first and last
      // NaN, NaN of both signs, signed zero, unused low bits
      {Format::FP32, "FP32", 32, 8, 23, 127, 0x1.fffffep127, 0x1p-126, 0x1p-149, 0x1p-23,
       {0x7f800000, 0xff800000}, 0x7f800001, 0x7fffffff, true, true},
      {Format::TF32, "TF32", 32, 8, 10, 127, 0x1.ffcp127, 0x1p-126, 0x1p-136, 0x1p-10,
       {0x7f800000, 0xff800000}, 0x7f800001, 0x7fffffff, true, true, 13},
      {Format::BF16, "BF16", 16, 8, 7, 127, 0x1.fep127, 0x1p-126, 0x1p-133, 0x1p-7,
       {0x7f80, 0xff80}, 0x7f81, 0x7fff, true, true},
      {Format::FP16, "FP16", 16, 5, 10, 15, 65504, 0x1p-14, 0x1p-24, 0x1p-10,
       {0x7c00, 0xfc00}, 0x7c01, 0x7fff, true, true},
      {Format::E4M3, "E4M3", 8, 4, 3, 7, 448, 0x1p-6, 0x1p-9, 0x1p-3, {}, 0x7f, 0x7f, true, true},
      {Format::E5M2, "E5M2", 8, 5, 2, 15, 57344, 0x1p-14, 0x1p-16, 0x1p-2, {0x7c, 0xfc}, 0x7d, 0x7f, true, true},
      {Format::E4M3FNUZ, "E4M3FNUZ", 8, 4, 3, 8, 240, 0x1p-7, 0x1p-10, 0x1p-3, {}, 0x80, 0x80, false, false},
      {Format::E5M2FNUZ, "E5M2FNUZ", 8, 5, 2, 16, 57344, 0x1p-15, 0x1p-17, 0x1p-2, {}, 0x80, 0x80, false, false},
      {Format::E8M0, "E8M0", 8, 8, 0, 127, 0x1p127, 0x1p-127, 0x1p-127, 1, {}, 0xff, 0xff, false, false},
      {Format::E2M1, "E2M1", 4, 2, 1, 1, 6, 1, 0.5, 0.5, {}, 1, 0, false, true},
  };
  // clang-format on
  return all;
}

const Spec& spec_of(Format format) {
  return *std::find_if(specs().begin(), specs().end(), [&](const Spec& s) { return s.format == format; });
}

bool is_nan_code(const Spec& spec, std::uint32_t code) {
  if (spec.nans_of_both_signs) code &= ~(1u << (spec.bits - 1));
  return code >= spec.first_nan && code <= spec.last_nan;
}

double value_of_code(const Spec& spec, std::uint32_t code) {
  if (spec.format == Format::E8M0) return std::ldexp(1.0, static_cast<int>(code) - 127);
  code >>= spec.unused_low_bits;
  const int sign_at = spec.exponent_bits + spec.mantissa_bits;
  const int exponent = (code >> spec.mantissa_bits) & ((1 << spec.exponent_bits) - 1);
  const double mantissa = std::ldexp(code & ((1 << spec.mantissa_bits) - 1), -spec.mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - spec.bias) : std::ldexp(1 + mantissa, exponent - spec.bias);
  return (code >> sign_at) & 1 ? -magnitude : magnitude;
}

Search::Search(Format format) : spec_(spec_of(format)) {
  for (std::uint32_t code = 0; code < 1u << (spec_.bits - 1); ++code) {
    const double value = value_of_code(spec_, code);
    values_.push_back(value);
    if (value > spec_.max) return;  // the first value past max is the neighbour that overflow has
  }
  values_.push_back(std::ldexp(1.0, (1 << spec_.exponent_bits) - spec_.bias));
}

Neighbours Search::neighbours(double magnitude) const {
  const auto above = std::lower_bound(values_.begin(), values_.end() - 1, magnitude);
  const auto below = *above == magnitude || above == values_.begin() ? above : above - 1;
  return {*below, *above, static_cast<std::uint32_t>(below - values_.begin()),
          static_cast<std::uint32_t>(above - values_.begin())};
}

std::uint32_t Search::cast(float x, CastMode mode, std::uint32_t random) const {
  const auto max_code = static_cast<std::uint32_t>(values_.size() - 2);
  const bool has_nan = spec_.first_nan <= spec_.last_nan;
  const std::uint32_t sign = std::signbit(x) ? 1u << (spec_.bits - 1) : 0;
  if (std::isnan(x)) {
    if (!has_nan) return max_code;
    // IEEE-like formats: the quiet NaN is the one with only the top mantissa bit set.
    if (!spec_.inf_codes.empty()) return spec_.inf_codes[0] | 1u << (spec_.mantissa_bits - 1) | sign;
    return spec_.first_nan | sign;
  }
  const std::uint32_t non_finite = !spec_.inf_codes.empty() ? spec_.inf_codes[0]
                                   : has_nan                ? spec_.first_nan
                                                            : max_code;
  if (std::isinf(x)) return (mode.inf_input == InfInput::Saturate ? max_code : non_finite) | sign;

  const double magnitude = std::fabs(static_cast<double>(x));
  const Neighbours n = neighbours(magnitude);
  // The midpoint is exact in double, while the distances to the neighbours need not be.
  const double midpoint = (n.below + n.above) / 2;
  bool up = false;
  if (magnitude > n.above) {
    up = true;
  } else if (mode.rounding == Rounding::NearestEven) {
    up = magnitude > midpoint || (magnitude == midpoint && n.code_below % 2 == 1);
  } else if (mode.rounding == Rounding::Stochastic && n.above > n.below) {
    const double fraction = (magnitude - n.below) / (n.above - n.below);
    up = std::floor(std::ldexp(fraction, 32)) + random >= std::ldexp(1.0, 32);
  }
  const std::uint32_t code = up ? n.code_above : n.code_below;
  if (code > max_code) {
    const bool stop = mode.overflow == Overflow::Saturate || mode.rounding == Rounding::TowardZero;
    return (stop ? max_code : non_finite) | sign;
  }
  return code == 0 && !spec_.signed_zero ? 0 : code | sign;
}

std::vector<float> edge_values(Format format) {
  const Spec& spec = spec_of(format);
  std::vector<float> magnitudes = {0, std::numeric_limits<float>::infinity()};
  const auto add_with_neighbours = [&](double exact) {
    const auto x = static_cast<float>(exact);
    magnitudes.insert(magnitudes.end(), {x, std::nextafter(x, 0.0f), std::nextafter(x, HUGE_VALF)});
  };
  const std::uint32_t stride = spec.bits == 16 ? 61 : spec.bits == 32 ? 1000003 : 1;
  for (std::uint32_t code = 0; code < 1u << (spec.bits - 1); code += stride) {
    const std::uint32_t one = 1u << spec.unused_low_bits, here = code & ~(one - 1);
    const double value = value_of_code(spec, here), next = value_of_code(spec, here + one);
    if (std::fabs(next) > 0x1p127) continue;
    add_with_neighbours(value);
    add_with_neighbours((value + next) / 2);
  }
  add_with_neighbours(spec.max);
  add_with_neighbours(spec.max * (1 + spec.epsilon / 4));
  for (int exponent = -149; exponent <= 127; ++exponent) add_with_neighbours(std::ldexp(1.0, exponent));
  std::mt19937 random(20);
  for (int i = 0; i < 50000; ++i)
    magnitudes.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random() & 0x7fffffff)));
  for (std::uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7fa00001u})
    magnitudes.push_back(std::bit_cast<float>(nan));

  std::vector<float> all;
  for (float x : magnitudes) {
    all.push_back(x);
    all.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) | 0x80000000u));
  }
  return all;
}

}  // namespace halfstep::oracle
