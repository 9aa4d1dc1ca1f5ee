#include "tensor/aten_storage.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <halfstep/error.h>

#include <cmath>
#include <limits>

#include "tensor/dense.h"

namespace halfstep {
namespace {

constexpr int64_t kSign = std::numeric_limits<int32_t>::min(), kQuietNan = 0x7fc00000, kInfCode = 0x7f80,
                  kMagnitude = 0x7fff, kLowHalf = 1 << 16;

constexpr int64_t as_signed(std::uint32_t word) { return static_cast<std::int32_t>(word); }

at::Tensor codes_of(const at::Tensor& low) { return low.view(at::kShort); }

at::Tensor joined(const at::Tensor& working, const at::Tensor& remainder) {
  const at::Tensor code = codes_of(working).to(at::kInt), below = remainder.to(at::kInt);
  const at::Tensor magnitude = at::bitwise_and(code, kMagnitude);
  const at::Tensor stale = magnitude.eq(0).logical_and(below.lt(0)).logical_or(magnitude.ge(kInfCode));
  // A product, not a shift: of a signed code it is the same number, and never overflows.
  return (code * kLowHalf + below.masked_fill(stale, 0)).view(at::kFloat);
}

StoredWeights split(const at::Tensor& values) {
  const at::Tensor given = values.view(at::kInt);
  const at::Tensor bits =
      at::where(at::isnan(values), at::bitwise_or(at::bitwise_and(given, kSign), kQuietNan), given);
  return {.working = at::bitwise_right_shift(bits + kLowHalf / 2, 16).to(at::kShort).view(at::kBFloat16),
          .master = bits.to(at::kShort)};  // the lower 16 bits
}

/// x ^= x >> by, as for an unsigned number.
void mix_down(at::Tensor& x, int64_t by) {
  x.bitwise_xor_(at::bitwise_right_shift(x, by).bitwise_and_((int64_t{1} << (32 - by)) - 1));
}

/// The compensation in FP32, 0 where the working copy was written to since.
at::Tensor compensation_of(const at::Tensor& working, const at::Tensor& compensation) {
  const at::Tensor whole = compensation.to(at::kFloat);
  // As load_compensation (kernels/storage.cpp) has it: a little less than half a unit in the last place.
  const double nearly =
      1 - std::ldexp(1.0, -traits(*training_format(working.scalar_type())).mantissa_bits - 1);
  const at::Tensor sum = working.to(at::kFloat) + whole * nearly;
  const at::Tensor counts = codes_of(sum.to(working.scalar_type())).eq(codes_of(working));
  return at::where(counts, whole, 0.0);
}

}  // namespace

at::Tensor load_weights_by_aten(WeightStorage storage, const at::Tensor& given, const at::Tensor& master) {
  const at::NoGradGuard no_grad;
  const at::Tensor working = given.detach();
  switch (storage) {
    case WeightStorage::Fp32:
      return working.clone();
    case WeightStorage::Fp32Master: {
      const at::Tensor edited = codes_of(master.to(working.scalar_type())).ne(codes_of(working));
      return at::where(edited, working.to(at::kFloat), master);
    }
    case WeightStorage::SplitMaster:
      return joined(working, master);
    case WeightStorage::Kahan:
      return working.to(at::kFloat) + compensation_of(working, master);
    case WeightStorage::Stochastic:
    case WeightStorage::Nearest:
      return working.to(at::kFloat);
  }
  HALFSTEP_BUG("unknown WeightStorage ", static_cast<int>(storage));
}

StoredWeights stored_by_aten(WeightStorage storage, at::ScalarType low, const at::Tensor& values,
                             const at::Tensor& words) {
  const at::NoGradGuard no_grad;
  switch (storage) {
    case WeightStorage::Fp32:
      return {.working = values, .master = {}};
    case WeightStorage::Fp32Master:
      return {.working = values.to(low), .master = values};
    case WeightStorage::SplitMaster:
      return split(values);
    case WeightStorage::Kahan: {
      const at::Tensor working = values.to(low);
      return {.working = working, .master = (values - working.to(at::kFloat)).to(low)};
    }
    case WeightStorage::Stochastic:
      return {.working = words.defined() ? rounded_at_random(values, low, words) : values.to(low),
              .master = {}};
    case WeightStorage::Nearest:
      return {.working = values.to(low), .master = {}};
  }
  HALFSTEP_BUG("unknown WeightStorage ", static_cast<int>(storage));
}

void store_weights_by_aten(WeightStorage storage, const at::Tensor& values, const at::Tensor& working,
                           const at::Tensor& master) {
  const at::NoGradGuard no_grad;
  const StoredWeights stored = stored_by_aten(storage, working.scalar_type(), values);
  working.detach().copy_(stored.working);
  if (stored.master.defined()) master.detach().copy_(stored.master);
}

at::Tensor random_words(int64_t count, std::uint32_t key, const at::Tensor& step) {
  const at::NoGradGuard no_grad;
  // Each step another place of a sequence of 2^32; multiplications and shifts of known little bias scatter
  // its neighbours (C. Wellons, hash-prospector: "lowbias32").
  at::Tensor x = at::arange(count, at::TensorOptions(step.device()).dtype(at::kInt));
  x.add_(step * as_signed(0x9E3779B9u)).bitwise_xor_(as_signed(key));
  mix_down(x, 16);
  x.mul_(as_signed(0x7FEB352Du));
  mix_down(x, 15);
  x.mul_(as_signed(0x846CA68Bu));
  mix_down(x, 16);
  return x;
}

at::Tensor rounded_at_random(const at::Tensor& values, at::ScalarType low, const at::Tensor& words) {
  const at::NoGradGuard no_grad;
  if (low == at::kBFloat16) {
    const at::Tensor bits = at::bitwise_and(words, 0xffff).add_(values.view(at::kInt));
    const at::Tensor rounded = bits.bitwise_right_shift_(16).to(at::kShort).view(low);
    return at::where(at::isnan(values), values.to(low), rounded);
  }
  // 2^-112 of FP16's numbers have their last bit at bit 13 of FP32, below 2^-126 too.
  const at::Tensor moved = values * 0x1p-112;
  const at::Tensor bits = at::bitwise_and(words, 0x1fff).add_(moved.view(at::kInt)).bitwise_and_(~0x1fff);
  return at::where(at::isnan(values), values, bits.view(at::kFloat) * 0x1p112).to(low);
}

}  // namespace halfstep
