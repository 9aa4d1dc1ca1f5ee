// Matrices that quantisers get wrong, and scales from their definitions: what the kernels are compared with.
// Shares no line with them.
#pragma once

#include <halfstep/formats.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/quantise.h"

namespace halfstep::testing {

struct Matrix {
  std::string what;
  std::size_t rows, columns;
  std::vector<float> values;  // each exact in BF16
};

inline float as_bf16(float value) {
  return decode_float(encode_float(value, Format::BF16, {.overflow = Overflow::NonFinite}), Format::BF16);
}

/// What has gone wrong in quantisers: subnormals, outliers, blocks of zeros, ties, mixed signs, huge ranges.
inline std::vector<Matrix> adversarial(std::size_t rows, std::size_t columns, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<std::uint32_t> word;
  const auto filled = [&](std::string what, const std::function<float(std::size_t, std::size_t)>& value) {
    Matrix matrix{std::move(what), rows, columns, {}};
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t c = 0; c < columns; ++c) matrix.values.push_back(as_bf16(value(r, c)));
    return matrix;
  };
  return {
      filled("normal", [&](auto, auto) { return normal(random); }),
      filled("outlier channels",
             [&](auto, auto c) { return normal(random) * (c % 29 == 3 ? 4096.0f : 1.0f); }),
      filled("blocks of zeros",
             [&](auto r, auto c) { return (r / 16 + c / 16) % 3 ? normal(random) : 0.0f; }),
      filled("ties",
             [&](auto r, auto c) {
               return static_cast<float>((r * columns + c) % 257) / 16 * (c % 2 ? 1 : -1);
             }),
      filled("subnormal", [&](auto, auto) { return std::bit_cast<float>(word(random) & 0x80ffffffu); }),
      filled(
          "wide range",
          [&](auto, auto) { return std::ldexp(normal(random), static_cast<int>(word(random) % 200) - 100); }),
      filled("largest", [&](auto, auto c) { return c % 5 ? normal(random) : -3.3e38f; }),
      filled("zeros", [&](auto, auto c) { return c % 2 ? 0.0f : -0.0f; }),
  };
}

struct Reference {
  float encode = 0;
  std::uint32_t stored = 0;
};

/// From the rule's definition. Powers of two are found by search, not by fields of FP32.
inline Reference reference_scale(double amax, const QuantiseRule& rule) {
  const double max = traits(rule.codes).max;
  const auto power_at_most = [](double x) {
    int exponent = 200;
    while (std::ldexp(1.0, exponent) > x && exponent > -200) --exponent;
    return exponent;
  };
  switch (rule.scale) {
    case ScaleRule::Fp32:
    case ScaleRule::PowerOfTwo: {
      auto encode = static_cast<float>(max / std::max(amax, 1e-12));
      if (rule.scale == ScaleRule::PowerOfTwo)
        encode = static_cast<float>(std::ldexp(1.0, power_at_most(encode)));
      return {encode, std::bit_cast<std::uint32_t>(1 / encode)};
    }
    case ScaleRule::Unscaled:
      return {1, std::bit_cast<std::uint32_t>(1.0f)};
    case ScaleRule::E8m0Floor: {
      const int code = std::max(power_at_most(amax) - power_at_most(max) + 127, 0);
      return {static_cast<float>(std::ldexp(1.0, 127 - code)), static_cast<std::uint32_t>(code)};
    }
    case ScaleRule::E8m0Ceil: {
      const auto quotient = static_cast<float>(static_cast<float>(amax) / static_cast<float>(max));
      int code = 0;
      while (std::ldexp(1.0, code - 127) < quotient) ++code;
      return {static_cast<float>(std::ldexp(1.0, 127 - code)), static_cast<std::uint32_t>(code)};
    }
    case ScaleRule::E4m3: {
      const float wanted = static_cast<float>(amax) / 6.0f / rule.tensor_scale;
      const std::uint32_t code = encode_float(std::min(std::max(wanted, 0x1p-6f), 448.0f), Format::E4M3);
      return {1 / rule.tensor_scale / decode_float(code, Format::E4M3), code};
    }
  }
  return {};
}

}  // namespace halfstep::testing
