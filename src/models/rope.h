// Rotary positions, as Hugging Face has them: element i of a head's first half turns with element i of its
// second half.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/models.h>

namespace halfstep::models {

/// cos and sin of every angle, [length, head_dim], FP32.
struct Rotation {
  at::Tensor cos, sin;
};

/// Angles of positions 0 to length - 1, in the arithmetic of transformers step by step: FP32, whose rounding
/// at far positions the published weights were trained with.
Rotation rotation_of(const RopeParameters& rope, int64_t head_dim, int64_t length, at::Device device);

/// Turns [batch, heads, length, head_dim]. In FP32, rounded once to the type of `x`.
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation);

}  // namespace halfstep::models
