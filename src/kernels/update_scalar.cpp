// The stages of an optimizer step, written for reading: the twin that the other ISAs must equal bit for bit.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/cast_constants.h"
#include "kernels/moment_codes.h"
#include "kernels/update.h"

namespace halfstep {
namespace {

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

template <Format format>
float grad_at(const void* grads, std::size_t i) {
  if constexpr (format == Format::FP32) {
    return static_cast<const float*>(grads)[i];
  } else {
    float value;
    kScalarKernels.format[static_cast<int>(format)].decode(static_cast<const std::uint16_t*>(grads) + i,
                                                           &value, 1);
    return value;
  }
}

template <Format format>
void sum_of_squares(const void* grads, std::size_t count, double* lanes) {
  for (std::size_t i = 0; i < count; ++i) {
    const double value = grad_at<format>(grads, i);
    lanes[i % kSquareLanes] += value * value;
  }
}

template <Format format>
void load_grads(const void* grads, float multiplier, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] = grad_at<format>(grads, i) * multiplier;
}

template <Format format>
void accumulate(const void* grads, float* sum, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += grad_at<format>(grads, i);
}

/// The fused multiply-adds stand where LibTorch's vector code has them. A lerp with a weight of one half or
/// more starts at the other end, as at::lerp does.
void adamw(const AdamWStep& step, const UpdateTile& tile, std::size_t count) {
  const bool from_moment = step.first_weight < 0.5f;
  const float lerp_weight = from_moment ? step.first_weight : step.first_weight - 1;
  for (std::size_t i = 0; i < count; ++i) {
    const float weight = tile.weight[i], grad = tile.grad[i], before = tile.first_moment[i];
    const float first = std::fma(lerp_weight, grad - before, from_moment ? before : grad);
    const float second = std::fma(step.second_weight * grad, grad, tile.second_moment[i] * step.beta2);
    const float denominator = std::sqrt(second) / step.second_correction + step.eps;
    const float change = step.negative_step_size * first / denominator;
    tile.first_moment[i] = first;
    tile.second_moment[i] = second;
    tile.next_weight[i] = weight * step.kept + change;
    tile.update[i] = change - weight * step.decay;
  }
}

void sgd(const SgdStep& step, const UpdateTile& tile, std::size_t count) {
  const auto momentum = static_cast<float>(step.momentum);
  const auto grad_share = static_cast<float>(1 - step.dampening);
  const auto decay = static_cast<float>(step.weight_decay);
  const auto negative_rate = static_cast<float>(-step.learning_rate);
  for (std::size_t i = 0; i < count; ++i) {
    const float weight = tile.weight[i];
    const float grad = decay != 0 ? std::fma(decay, weight, tile.grad[i]) : tile.grad[i];
    float direction = grad;
    if (tile.first_moment) {
      const float moment = step.first ? grad : std::fma(grad, grad_share, tile.first_moment[i] * momentum);
      tile.first_moment[i] = moment;
      direction = step.nesterov ? std::fma(moment, momentum, grad) : moment;
    }
    tile.next_weight[i] = std::fma(negative_rate, direction, weight);
    tile.update[i] = negative_rate * direction;
  }
}

/// A remainder that belongs to no master is what is left of a weight that was written to since. Below a zero
/// there is nothing: a negative remainder would borrow from the sign and give a NaN. Beside an Inf and a NaN
/// any remainder would give another number; a master that rounded up to an Inf becomes one.
void join(const std::uint16_t* working, const std::uint16_t* remainder, float* master, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const int magnitude = working[i] & 0x7fff;
    const bool stale = (magnitude == 0 && (remainder[i] & 0x8000) != 0) || magnitude >= 0x7f80;
    const auto below = stale ? 0 : static_cast<std::uint32_t>(static_cast<std::int16_t>(remainder[i]));
    master[i] = std::bit_cast<float>((std::uint32_t{working[i]} << 16) + below);
  }
}

/// A NaN is freed of its payload: carried, 0x7fffffff would become -0.
std::uint32_t without_payload(float value) {
  const std::uint32_t bits = bits_of(value);
  return std::isnan(value) ? (bits & kFp32Sign) | kFp32QuietNan : bits;
}

void split(const float* master, std::uint16_t* working, std::uint16_t* remainder, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = without_payload(master[i]);
    working[i] = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
    remainder[i] = static_cast<std::uint16_t>(bits);
  }
}

void round_bf16(const float* values, std::uint16_t* codes, std::size_t count) {
  constexpr std::uint32_t inf = traits(Format::BF16).inf_code;
  kScalarKernels.format[static_cast<int>(Format::BF16)].nearest_even(values, codes, count, {inf, inf});
}

void add(const float* a, const float* b, float* sum, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] = a[i] + b[i];
}

void left_of(const float* addend, const float* before, const float* after, float* left, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) left[i] = addend[i] - (after[i] - before[i]);
}

template <int which>
std::uint32_t dither_of(const Dither& dither, std::size_t i) {
  return (which == kSecond ? std::rotl(dither.words[i], 16) : dither.words[i]) + dither.phase;
}

template <int which>
void round_bf16_moment(const float* values, Dither dither, std::uint16_t* codes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(values[i]), fraction = bits << 16;
    const bool up = fraction + dither_of<which>(dither, i) < fraction;
    const bool nan = (bits & ~kFp32Sign) > kFp32Inf;
    codes[i] = static_cast<std::uint16_t>(((nan ? bits | kFp32QuietNan : bits) >> 16) + (up && !nan));
  }
}

template <int which>
float block_scale(const float* values, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(values[i]) & ~kFp32Sign);
  if (largest == 0) return 0;
  // What is not finite stays visible: the whole block becomes NaN.
  if (largest >= kFp32Inf) return std::bit_cast<float>(kFp32QuietNan);
  const bool above = (largest & (kFp32HiddenBit - 1)) > largest_fraction(kMomentCodes[which]);
  const std::uint32_t exponent = (largest >> 23) + above;
  return std::bit_cast<float>(std::clamp(exponent, kMinScaleExponent, kMaxScaleExponent) << 23);
}

/// The same fixed-point rounding as cast_one in scalar.cpp.
template <int which>
void round_block_moment(const float* values, float scale, Dither dither, std::uint8_t* codes,
                        std::size_t count) {
  if (!(scale > 0)) {
    std::fill_n(codes, count, std::uint8_t{0});
    return;
  }
  constexpr MomentCodes k = kMomentCodes[which];
  const std::uint32_t first_normal = (bits_of(scale) >> 23) - (kTopMomentExponent - 1);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(values[i]), magnitude = bits & ~kFp32Sign;
    const std::uint32_t hidden_bit = magnitude < kFp32HiddenBit ? 0 : kFp32HiddenBit;
    const std::uint32_t significand = (magnitude & (kFp32HiddenBit - 1)) | hidden_bit;
    const std::uint32_t exponent = std::max(magnitude >> 23, 1u);
    const std::uint32_t coarse_exponent = std::max(exponent, first_normal);
    const std::uint32_t shift = std::min(23u - k.mantissa_bits + (coarse_exponent - exponent), 63u);
    const std::uint64_t steps = (std::uint64_t{significand} << 32) >> shift;
    const auto rounded = static_cast<std::uint32_t>((steps + dither_of<which>(dither, i)) >> 32);
    std::uint32_t code = rounded + ((coarse_exponent - first_normal) << k.mantissa_bits);
    code = std::min(code, largest_moment_code(k));
    if (magnitude != 0) code = std::max(code, k.smallest_of_nonzero);
    codes[i] = static_cast<std::uint8_t>(code | (k.has_sign ? bits >> 31 << 7 : 0));
  }
}

template <int which>
void load_block_moment(const std::uint8_t* codes, float scale, float* values, std::size_t count) {
  constexpr MomentCodes k = kMomentCodes[which];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = k.has_sign ? codes[i] & 0x7f : codes[i];
    const std::uint32_t sign = k.has_sign && codes[i] >> 7 ? kFp32Sign : 0;
    const bool subnormal = magnitude >> k.mantissa_bits == 0;
    const std::uint32_t normal = (magnitude << (23 - k.mantissa_bits)) + ((127 - kTopMomentExponent) << 23);
    const std::uint32_t in_scales =
        subnormal ? bits_of(static_cast<float>(magnitude) * smallest_moment(k)) : normal;
    values[i] = std::bit_cast<float>(in_scales | sign) * scale;
  }
}

/// A NaN asks for nothing: whether the weight "moves" from one NaN to another is the compiler's choice.
bool asks(float update) { return std::abs(update) > 0; }

std::size_t nonzero(const float* update, std::size_t count) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += asks(update[i]);
  return found;
}

std::size_t unmoved_words(const float* update, const float* before, const float* after, std::size_t count) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += asks(update[i]) && bits_of(before[i]) == bits_of(after[i]);
  return found;
}

std::size_t unmoved_codes(const float* update, const std::uint16_t* before, const std::uint16_t* after,
                          std::size_t count) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += asks(update[i]) && before[i] == after[i];
  return found;
}

}  // namespace

constinit const UpdateStages kScalarUpdateStages = {
    .sum_of_squares = {sum_of_squares<Format::FP32>, sum_of_squares<Format::BF16>,
                       sum_of_squares<Format::FP16>},
    .load_grads = {load_grads<Format::FP32>, load_grads<Format::BF16>, load_grads<Format::FP16>},
    .accumulate = {accumulate<Format::FP32>, accumulate<Format::BF16>, accumulate<Format::FP16>},
    .adamw = adamw,
    .fused_adamw = {},
    .sgd = sgd,
    .join = join,
    .split = split,
    .round_bf16 = round_bf16,
    .add = add,
    .left_of = left_of,
    .round_bf16_moment = {round_bf16_moment<kFirst>, round_bf16_moment<kSecond>},
    .block_scale = {block_scale<kFirst>, block_scale<kSecond>},
    .round_block_moment = {round_block_moment<kFirst>, round_block_moment<kSecond>},
    .load_block_moment = {load_block_moment<kFirst>, load_block_moment<kSecond>},
    .nonzero = nonzero,
    .unmoved_words = unmoved_words,
    .unmoved_codes = unmoved_codes,
};

}  // namespace halfstep
