// The loops of PointwiseLoops, for the compiler to make vectors of. Each ISA's file includes this once; all
// is local to that file, see avx512.cpp for why.
//
// Products and sums are fused only where `fma` says so: every ISA has the same bits, but for NaNs'.
#pragma once

#include <bit>

#include "kernels/cast_constants.h"
#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

inline float loaded(const float* values, std::size_t i) { return values[i]; }
inline float loaded(const std::uint16_t* values, std::size_t i) {
  return std::bit_cast<float>(std::uint32_t{values[i]} << 16);
}

inline void store(float value, float* values, std::size_t i) { values[i] = value; }
/// Nearest even; every NaN is the same.
inline void store(float value, std::uint16_t* codes, std::size_t i) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  codes[i] = static_cast<std::uint16_t>(value == value ? nearest : kFp32QuietNan >> 16);
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

/// e^x, off by less than 1.5 * 2^-24 of it; 0 below e^-87.7, Inf above e^88.4. x = n ln 2 + r, and e^r is
/// Cephes' polynomial (expf.c).
inline float exp_of(float x) {
  constexpr float kLeast = -88, kMost = 89;  // n = -127 and 128, whose powers of two are 0 and Inf
  constexpr float kLog2E = 0x1.715476p+0f, kLn2High = 0x1.62e43p-1f, kLn2Low = -0x1.05c61p-29f;
  constexpr float kInteger = 0x1.8p+23f;  // to add it rounds to a whole number
  x = x > kMost ? kMost : x;
  x = x < kLeast ? kLeast : x;
  const float shifted = fma(x, kLog2E, kInteger);
  const float n = shifted - kInteger;
  const float r = fma(-n, kLn2Low, fma(-n, kLn2High, x));
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(fma(p, r, 1), r, 1);
  // The low bits of `shifted` are n's.
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127) << 23);
}

template <typename Value>
void swiglu(const void* gates, const void* ups, void* outputs, std::size_t count) {
  const auto* __restrict gate = static_cast<const Value*>(gates);
  const auto* __restrict up = static_cast<const Value*>(ups);
  auto* __restrict output = static_cast<Value*>(outputs);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = loaded(gate, i);
    store(x / (1 + exp_of(-x)) * loaded(up, i), output, i);
  }
}

template <typename Value>
void swiglu_backward(const void* gates, const void* ups, const void* grads, void* gate_grads, void* up_grads,
                     std::size_t count) {
  const auto* __restrict gate = static_cast<const Value*>(gates);
  const auto* __restrict up = static_cast<const Value*>(ups);
  const auto* __restrict grad = static_cast<const Value*>(grads);
  auto* __restrict gate_grad = static_cast<Value*>(gate_grads);
  auto* __restrict up_grad = static_cast<Value*>(up_grads);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = loaded(gate, i), g = loaded(grad, i);
    const float passed = 1 / (1 + exp_of(-x));
    store(g * (x * passed), up_grad, i);
    store(g * loaded(up, i) * (passed * fma(x, 1 - passed, 1)), gate_grad, i);
  }
}

/// (1 + tanh(y)) / 2 = 1 / (1 + e^(-2 y)), where y = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kTwiceRootOfTwoOverPi = 0x1.988454p+0F, kCubic = 0.044715F;
inline float passed_by_tanh(float x) {
  const float twice = x * kTwiceRootOfTwoOverPi * fma(kCubic * x, x, 1);
  return 1 / (1 + exp_of(-twice));
}

template <typename Value>
void gelu(const void* values, void* outputs, std::size_t count) {
  const auto* __restrict value = static_cast<const Value*>(values);
  auto* __restrict output = static_cast<Value*>(outputs);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = loaded(value, i);
    store(x * passed_by_tanh(x), output, i);
  }
}

template <typename Value>
void gelu_backward(const void* values, const void* grads, void* value_grads, std::size_t count) {
  const auto* __restrict value = static_cast<const Value*>(values);
  const auto* __restrict grad = static_cast<const Value*>(grads);
  auto* __restrict value_grad = static_cast<Value*>(value_grads);
  for (std::size_t i = 0; i < count; ++i) {
    float x = loaded(value, i);
    // The slope is 0 or 1 long before. Further out its terms would be Inf times 0.
    x = x > 16 ? 16 : x;
    x = x < -16 ? -16 : x;
    const float passed = passed_by_tanh(x);
    const float inner = kTwiceRootOfTwoOverPi * fma(3 * kCubic * x, x, 1);
    store(loaded(grad, i) * (passed * fma(x * (1 - passed), inner, 1)), value_grad, i);
  }
}

template <typename Value, bool back>
void rotate(const void* values, std::size_t stride, void* outputs, std::size_t output_stride,
            std::size_t rows, const float* __restrict cos, const float* __restrict sin, std::size_t half) {
  for (std::size_t row = 0; row < rows; ++row) {
    const auto* __restrict first = static_cast<const Value*>(values) + row * stride;
    const auto* __restrict second = first + half;
    auto* __restrict first_output = static_cast<Value*>(outputs) + row * output_stride;
    auto* __restrict second_output = first_output + half;
    for (std::size_t i = 0; i < half; ++i) {
      const float a = loaded(first, i), b = loaded(second, i);
      if constexpr (back) {
        store(a * cos[i] + b * sin[half + i], first_output, i);
        store(b * cos[half + i] - a * sin[i], second_output, i);
      } else {
        store(a * cos[i] - b * sin[i], first_output, i);
        store(b * cos[half + i] + a * sin[half + i], second_output, i);
      }
    }
  }
}

constexpr PointwiseLoops kLoops = {
    .swiglu = {swiglu<float>, swiglu<std::uint16_t>},
    .swiglu_backward = {swiglu_backward<float>, swiglu_backward<std::uint16_t>},
    .rotate = {rotate<float, false>, rotate<std::uint16_t, false>},
    .rotate_back = {rotate<float, true>, rotate<std::uint16_t, true>},
    .gelu = {gelu<float>, gelu<std::uint16_t>},
    .gelu_backward = {gelu_backward<float>, gelu_backward<std::uint16_t>},
};

}  // namespace
}  // namespace halfstep
