#include "models/rope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <halfstep/error.h>

#include <numbers>

namespace halfstep::models {
namespace {

/// Llama 3.1: pairs that turn fully within the old context keep their speed, those far slower turn `factor`
/// times slower still, those between are between.
at::Tensor stretched(const at::Tensor& speeds, const RopeParameters& rope) {
  const auto old_context = static_cast<double>(rope.original_max_position_embeddings);
  const double slow_from = old_context / rope.low_freq_factor, fast_to = old_context / rope.high_freq_factor;
  const at::Tensor positions_per_turn = 2 * std::numbers::pi / speeds;
  const at::Tensor quickness = (old_context / positions_per_turn - rope.low_freq_factor) /
                               (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor between = (1 - quickness) * speeds / rope.factor + quickness * speeds;
  const at::Tensor slow = positions_per_turn > slow_from, fast = positions_per_turn < fast_to;
  return at::where(slow, speeds / rope.factor, at::where(fast, speeds, between));
}

at::Tensor speeds_of(const RopeParameters& rope, int64_t head_dim, at::TensorOptions fp32) {
  const at::Tensor exponents = at::arange(0, head_dim, 2, fp32) / head_dim;
  const at::Tensor speeds = 1.0 / at::pow(rope.rope_theta, exponents);
  if (rope.rope_type == "linear") return speeds / rope.factor;
  if (rope.rope_type == "llama3") return stretched(speeds, rope);
  return speeds;
}

}  // namespace

Rotation rotation_of(const RopeParameters& rope, int64_t head_dim, int64_t length, at::Device device) {
  const at::NoGradGuard no_grad;
  const auto fp32 = at::TensorOptions(at::kFloat).device(device);
  const at::Tensor half = at::arange(length, fp32).unsqueeze(1) * speeds_of(rope, head_dim, fp32);
  const at::Tensor angles = at::cat({half, half}, -1);
  return {.cos = angles.cos(), .sin = angles.sin()};
}

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  const auto halves = x.chunk(2, -1);
  const at::Tensor quarter_turn = at::cat({-halves[1], halves[0]}, -1);
  return (x * rotation.cos + quarter_turn * rotation.sin).to(x.scalar_type());
}

}  // namespace halfstep::models
