// The loops of NormRows, for the compiler to make vectors of. Each ISA's file includes this once; all is
// local to that file, see avx512.cpp for why.
#pragma once

#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

constexpr std::size_t kDotLanes = 16;

void scale(const float* __restrict values, float factor, const float* __restrict gain,
           float* __restrict output, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) output[i] = values[i] * factor * gain[i];
}

double dot(const float* __restrict values, const float* __restrict grads, const float* __restrict gain,
           std::size_t count) {
  double lanes[kDotLanes] = {};
  const auto add = [&](std::size_t i, std::size_t lane) {
    lanes[lane] += double{values[i]} * (double{grads[i]} * double{gain[i]});
  };
  std::size_t i = 0;
  for (; i + kDotLanes <= count; i += kDotLanes)
    for (std::size_t lane = 0; lane < kDotLanes; ++lane) add(i + lane, lane);
  for (std::size_t lane = 0; i + lane < count; ++lane) add(i + lane, lane);
  for (std::size_t half = kDotLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

void backward(const float* __restrict values, const float* __restrict grads, const float* __restrict gain,
              float factor, float along, float* __restrict value_grads, float* __restrict gain_grads,
              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float normed = values[i] * factor;
    value_grads[i] = factor * (grads[i] * gain[i] - normed * along);
    gain_grads[i] += grads[i] * normed;
  }
}

constexpr NormRows kLoops = {.scale = scale, .dot = dot, .backward = backward};

}  // namespace
}  // namespace halfstep
