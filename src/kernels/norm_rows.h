// What an RMS norm does to one row in FP32, as functions over arrays that the first-level cache keeps, one
// set an ISA. norm.cpp brings rows to FP32 and back.
#pragma once

#include <cstddef>

namespace halfstep {

struct NormRows {
  // output[i] = values[i] * factor * gain[i]
  void (*scale)(const float* values, float factor, const float* gain, float* output, std::size_t count);
  // The sum of values[i] * grads[i] * gain[i] in FP64, in an order that every ISA has.
  double (*dot)(const float* values, const float* grads, const float* gain, std::size_t count);
  // With n[i] = values[i] * factor, what the norm makes of a value:
  // value_grads[i] = factor * (grads[i] * gain[i] - n[i] * along), gain_grads[i] += grads[i] * n[i]
  void (*backward)(const float* values, const float* grads, const float* gain, float factor, float along,
                   float* value_grads, float* gain_grads, std::size_t count);
};

extern const NormRows kScalarNormRows;
extern const NormRows kAvx2NormRows;    // run only where cpu_features().avx2
extern const NormRows kAvx512NormRows;  // run only where cpu_features().avx512

}  // namespace halfstep
