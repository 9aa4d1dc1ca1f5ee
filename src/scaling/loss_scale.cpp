// The state machine of the loss scale: options and state in, state out. No tensors here.
#include <halfstep/scaling.h>

#include <algorithm>
#include <cmath>

namespace halfstep {
namespace {

constexpr double kSmallestFloor = 0x1p-126;  // its inverse, 2^126, is far from FP32's overflow
constexpr double kLargestCap = 0x1p126;      // its inverse, 2^-126, is FP32's smallest normal number

// The scale is multiplied into FP32 tensors, so it takes only values that FP32 holds: torch.amp's rounding.
// A bound between two of them counts as the one inside.
double fp32_within(double value, const LossScaling& options) {
  const float nearest = static_cast<float>(value);
  if (nearest < options.floor) return std::nextafterf(nearest, kLargestCap);
  if (nearest > options.cap) return std::nextafterf(nearest, 0.0f);
  return nearest;
}

}  // namespace

void LossScaling::check() const {
  // Written so that a NaN fails: every comparison with one is false.
  HALFSTEP_CHECK(kSmallestFloor <= floor && floor <= 1.0, "LossScaling: floor is ", floor,
                 ", expected a number from 2^-126 to 1; the default is 2^-24.");
  HALFSTEP_CHECK(floor <= cap && cap <= kLargestCap, "LossScaling: cap is ", cap,
                 ", expected a number from the floor, ", floor,
                 ", to 2^126; above that the inverse of the scale leaves FP32's normal range.");
  HALFSTEP_CHECK(fp32_within(floor, *this) <= cap, "LossScaling: between floor and cap, both about ", cap,
                 ", there is no number that FP32 holds; for a fixed scale choose a power of two.");
  HALFSTEP_CHECK(floor <= initial && initial <= cap, "LossScaling: initial is ", initial,
                 ", expected a number from ", floor, " (floor) to ", cap, " (cap); the default is 65536.");
  HALFSTEP_CHECK(1.0 < growth_factor && growth_factor <= kLargestCap, "LossScaling: growth_factor is ",
                 growth_factor, ", expected a finite number above 1; the default is 2.");
  HALFSTEP_CHECK(0.0 < backoff_factor && backoff_factor < 1.0, "LossScaling: backoff_factor is ",
                 backoff_factor, ", expected a number between 0 and 1; the default is 0.5.");
  HALFSTEP_CHECK(growth_interval >= 1, "LossScaling: growth_interval is ", growth_interval,
                 ", expected at least 1 step; the default is 2000.");
  HALFSTEP_CHECK(hysteresis >= 1, "LossScaling: hysteresis is ", hysteresis,
                 ", expected at least 1, which lowers the scale on the first overflow.");
  HALFSTEP_CHECK(max_consecutive_skips >= 0, "LossScaling: max_consecutive_skips is ", max_consecutive_skips,
                 ", expected at least 0, which means no limit.");
}

LossScaleState initial_state(const LossScaling& options) {
  options.check();
  return {.loss_scale = fp32_within(options.initial, options)};
}

LossScaleState next_state(const LossScaling& options, LossScaleState state, bool grads_finite) {
  if (grads_finite) {
    state.consecutive_skips = 0;
    if (++state.clean_steps < options.growth_interval) return state;
    state.clean_steps = 0;
    state.overflows_forgiven = 0;
    state.loss_scale = fp32_within(std::min(state.loss_scale * options.growth_factor, options.cap), options);
    return state;
  }
  state.clean_steps = 0;
  ++state.consecutive_skips;
  ++state.total_skips;
  // As Megatron does: once patience is used up, every further overflow lowers the scale until it has grown
  // again.
  if (state.overflows_forgiven + 1 < options.hysteresis) {
    ++state.overflows_forgiven;
    return state;
  }
  state.loss_scale = fp32_within(std::max(state.loss_scale * options.backoff_factor, options.floor), options);
  return state;
}

}  // namespace halfstep
