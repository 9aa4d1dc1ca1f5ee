// Each layout and optimizer, one step at a time from the state that it left, against FP64.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/optimizer_state.h"

namespace halfstep {
namespace {

using namespace testing_state;

constexpr double kHalfUlp = 0x1p-24, kFp32Floor = 0x1p-149;

/// A number and how far from it FP32 may have come.
struct Near {
  double value, bound;
};

/// The weight and moments of an element as the storage holds them, in FP64.
struct Element {
  double working, total;    // total: master, or working copy and compensation; what the step should move
  double optimizer_weight;  // what the optimizer computes with
  double first, second;
};

double block_value(std::uint32_t code, double scale, bool second) {
  const int mantissa_bits = second ? 4 : 3;
  const double sign = !second && code >> 7 ? -1 : 1;
  const int magnitude = second ? code : code & 0x7f;
  const int exponent = magnitude >> mantissa_bits, steps = 1 << mantissa_bits;
  const double significand = double(magnitude % steps) / steps + (exponent > 0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - 15) * scale;
}

double moment_at(const State& state, const Array& moments, const Array& scales, std::size_t i, bool second) {
  if (moments.element_bytes == 0) return 0;
  switch (state.layout.moments) {
    case MomentStorage::Fp32:
      return moments.value(i);
    case MomentStorage::Bf16:
      return decode_float(moments.code(i), Format::BF16);
    default:
      return block_value(moments.code(i), scales.value(i / kMomentBlockElements), second);
  }
}

Element element_at(const State& state, std::size_t i) {
  Element e{};
  e.working = e.total = value_of(state.working.code(i), state.layout.working);
  const std::uint32_t companion = companion_bytes(state.layout.weights) ? state.companion.code(i) : 0;
  if (state.layout.weights == WeightStorage::Fp32Master) e.total = std::bit_cast<float>(companion);
  if (state.layout.weights == WeightStorage::SplitMaster)
    e.total = std::bit_cast<float>(
        std::uint32_t((std::int64_t{state.working.code(i)} << 16) + std::int16_t(companion)));
  e.optimizer_weight = e.total;
  if (state.layout.weights == WeightStorage::Kahan) e.total += value_of(companion, state.layout.working);
  e.first = moment_at(state, state.first, state.first_scale, i, false);
  e.second = moment_at(state, state.second, state.second_scale, i, true);
  return e;
}

struct Expected {
  Near first, second, update, next;  // next: the FP32 result, before any rounding to a storage
};

/// AdamW in FP64. Every bound counts half ulps: one for each operation and each rounded constant on the way,
/// and passes the bounds of the operands on. Second-order terms are far below the one that is added for luck.
Expected adamw(const Rates& r, int step, double grad_value, const Element& e) {
  const double u = kHalfUlp, grad = grad_value * r.grad_multiplier, grad_bound = u * std::abs(grad);
  const double share = 1 - r.beta1, difference = grad - e.first;
  Near m{e.first + share * difference, 0};
  m.bound = share * (3 * u * std::abs(difference) + grad_bound) + u * std::abs(m.value) + kFp32Floor;
  // All terms are positive, so relative bounds add: constants, two products, the gradient twice, one sum.
  Near v{r.beta2 * e.second + (1 - r.beta2) * grad * grad, 0};
  v.bound = 7 * u * v.value + 4 * kFp32Floor;
  const double correction = std::sqrt(1 - std::pow(r.beta2, step));
  const double denominator = std::sqrt(v.value) / correction + r.eps;
  const double relative = 4 * u + 5 * u + 4 * kFp32Floor / std::max(v.value, kFp32Floor);
  const double step_size = r.learning_rate / (1 - std::pow(r.beta1, step));
  Near change{-step_size * m.value / denominator, 0};
  change.bound = (relative + 3 * u) * std::abs(change.value) +
                 step_size * m.bound / denominator * (1 + relative) + kFp32Floor * (1 + 1 / denominator);
  const double decay = r.learning_rate * r.weight_decay, w = e.optimizer_weight;
  Near update{change.value - decay * w, 0};
  update.bound = change.bound + 2 * u * std::abs(decay * w) + u * std::abs(update.value) + 2 * kFp32Floor;
  Near next{w * (1 - decay) + change.value, 0};
  next.bound = change.bound + 2 * u * std::abs(w) + u * std::abs(next.value) + 2 * kFp32Floor;
  return {m, v, update, next};
}

/// SGD in FP64, bounds as above.
Expected sgd(const Rates& r, Optimizer optimizer, int step, double grad_value, const Element& e) {
  const double u = kHalfUlp, w = e.optimizer_weight;
  const double momentum = optimizer == Optimizer::SgdPlain ? 0 : r.momentum;
  const double dampening = optimizer == Optimizer::SgdNesterov ? 0 : r.dampening;
  Near grad{grad_value * r.grad_multiplier + r.weight_decay * w, 0};
  grad.bound = u * (std::abs(grad_value * r.grad_multiplier) + 2 * std::abs(r.weight_decay * w) +
                    std::abs(grad.value)) +
               2 * kFp32Floor;
  Near moment = grad, direction = grad;
  if (optimizer != Optimizer::SgdPlain) {
    if (step > 1) {
      moment.value = momentum * e.first + (1 - dampening) * grad.value;
      moment.bound =
          grad.bound +
          u * (2 * std::abs(momentum * e.first) + 2 * std::abs(grad.value) + std::abs(moment.value)) +
          kFp32Floor;
    }
    direction = moment;
    if (optimizer == Optimizer::SgdNesterov) {
      direction.value = grad.value + momentum * moment.value;
      direction.bound =
          grad.bound + moment.bound + u * (2 * std::abs(moment.value) + std::abs(direction.value));
    }
  }
  Near update{-r.learning_rate * direction.value, 0};
  update.bound = r.learning_rate * (direction.bound + 2 * u * std::abs(direction.value)) + kFp32Floor;
  Near next{w + update.value, 0};
  next.bound = update.bound + u * std::abs(next.value);
  return {moment, {0, 0}, update, next};
}

/// The distance of neighbours at `magnitude` in a format of this many mantissa bits.
double gap(double magnitude, int mantissa_bits, double smallest) {
  return std::max(std::ldexp(1.0, std::ilogb(std::max(magnitude, 1e-300)) - mantissa_bits), smallest);
}

double gap(double magnitude, Format format) {
  return gap(magnitude, traits(format).mantissa_bits, traits(format).min_subnormal);
}

void expect_moment(const State& state, double stored, Near expected, double scale, bool second) {
  double bound = expected.bound;
  const double reach = std::abs(expected.value) + expected.bound;
  if (state.layout.moments == MomentStorage::Bf16) bound += gap(reach, Format::BF16);
  if (state.layout.moments == MomentStorage::Blockwise8)
    bound += second ? gap(reach, 4, 0x1p-18 * scale) : gap(reach, 3, 0x1p-17 * scale);
  EXPECT_LE(std::abs(stored - expected.value), bound) << (second ? "second" : "first") << " moment";
}

void expect_weight(const State& state, const Element& before, const Element& after, const Expected& expected,
                   std::size_t i) {
  const Format format = state.layout.working;
  const double reach = std::abs(expected.next.value) + expected.next.bound;
  switch (state.layout.weights) {
    case WeightStorage::Fp32:
    case WeightStorage::Fp32Master:
    case WeightStorage::SplitMaster:
      EXPECT_LE(std::abs(after.total - expected.next.value), expected.next.bound) << "master";
      if (state.layout.weights == WeightStorage::Fp32Master) {
        EXPECT_EQ(state.working.code(i), code_of(float(after.total), format)) << "nearest even of the master";
      }
      EXPECT_LE(std::abs(after.working - after.total), gap(std::abs(after.total), format) / 2);
      break;
    case WeightStorage::Kahan: {
      // Two FP32 sums, and what is left rounded to the low format.
      const double left = after.total - after.working;
      const double bound = expected.update.bound + gap(std::abs(left), format) / 2 +
                           kHalfUlp * (2 * std::abs(expected.update.value) + 2 * std::abs(left) +
                                       2 * std::abs(before.total - before.working));
      EXPECT_LE(std::abs(after.total - (before.total + expected.update.value)), bound) << "sum";
      break;
    }
    case WeightStorage::Stochastic:
      EXPECT_LE(std::abs(after.working - expected.next.value), expected.next.bound + gap(reach, format));
      break;
    case WeightStorage::Nearest:
      EXPECT_LE(std::abs(after.working - expected.next.value), expected.next.bound + gap(reach, format) / 2);
      break;
  }
}

TEST(UpdateReference, EveryLayoutAndOptimizerStaysWithinTheBoundOfFp64) {
  constexpr std::size_t kCount = 300;
  const Rates rates;
  for (const UpdateLayout& layout : all_layouts())
    for (Optimizer optimizer : kOptimizers) {
      State state(layout, optimizer, kCount);
      state.set_weights(random_values(Values::Ordinary, kCount, 11));
      for (int step = 1; step <= 5; ++step) {
        std::vector<float> grads = random_values(Values::Ordinary, kCount, 20 + step);
        for (std::size_t i = 0; i < kCount; i += 3) grads[i] *= 1e-3f;
        state.set_grads(grads);
        std::vector<Element> before(kCount);
        for (std::size_t i = 0; i < kCount; ++i) before[i] = element_at(state, i);
        update(state, rates, step, kernels());
        for (std::size_t i = 0; i < kCount; ++i) {
          const double grad = value_of(state.grad.code(i), layout.grad);
          const Expected expected = optimizer == Optimizer::AdamW
                                        ? adamw(rates, step, grad, before[i])
                                        : sgd(rates, optimizer, step, grad, before[i]);
          const Element after = element_at(state, i);
          const std::size_t block = i / kMomentBlockElements;
          if (optimizer != Optimizer::SgdPlain)
            expect_moment(state, after.first, expected.first, state.first_scale.value(block), false);
          if (optimizer == Optimizer::AdamW)
            expect_moment(state, after.second, expected.second, state.second_scale.value(block), true);
          expect_weight(state, before[i], after, expected, i);
          ASSERT_FALSE(HasFailure()) << describe(layout, optimizer) << " step " << step << " element " << i;
        }
      }
    }
}

TEST(UpdateReference, TheStepConstantsAreThoseOfAdamW) {
  // By hand: beta1 = 0.5, beta2 = 0.75, step 2: corrections 1 - 1/4 = 3/4 and sqrt(1 - 9/16) = sqrt(7)/4.
  const AdamWStep step =
      adamw_step({.learning_rate = 0.5, .beta1 = 0.5, .beta2 = 0.75, .eps = 0.125, .weight_decay = 0.25}, 2);
  EXPECT_EQ(step.negative_step_size, float(-0.5 / 0.75));
  EXPECT_EQ(step.second_correction, float(std::sqrt(7.0) / 4));
  EXPECT_EQ(step.decay, 0.125f);
  EXPECT_EQ(step.kept, 0.875f);
  EXPECT_EQ(step.first_weight, 0.5f);
  EXPECT_EQ(step.second_weight, 0.25f);
}

/// Weights that move far, a little, not at all, and updates that are zero: counted from the arrays.
TEST(StallCounts, EqualACountOverTheArraysBeforeAndAfter) {
  constexpr std::size_t kCount = 1000;
  Rates rates;
  for (double weight_decay : {0.0, 1e-6})
    for (const UpdateLayout& layout : all_layouts())
      for (Optimizer optimizer : kOptimizers)
        for (const KernelTable* table : available_kernels()) {
          rates.weight_decay = weight_decay;
          // AdamW's first step is the learning rate's size whatever the gradient's; SGD's follows it.
          rates.learning_rate = 3e-8;
          rates.grad_multiplier = 1;
          State state(layout, optimizer, kCount);
          std::vector<float> weights(kCount), grads(kCount);
          for (std::size_t i = 0; i < kCount; ++i) {
            weights[i] = i % 7 == 0 ? 0.0f : std::exp2(float(i % 40) - 30);
            grads[i] = i % 5 == 0 ? 0.0f : i % 2 ? -1.0f : 1.0f;
          }
          state.set_weights(weights);
          state.set_grads(grads);
          State before = state;
          const UpdateCounts counts = update(state, rates, 1, *table);
          UpdateCounts brute;
          for (std::size_t i = 0; i < kCount; ++i) {
            const bool decays = weight_decay != 0 && element_at(before, i).optimizer_weight != 0;
            const bool nonzero = grads[i] != 0 || decays;
            const bool unmoved = nonzero && before.working.code(i) == state.working.code(i);
            const bool companion_too =
                companion_bytes(layout.weights) == 0 || before.companion.code(i) == state.companion.code(i);
            brute.nonzero += nonzero;
            brute.working_unmoved += unmoved;
            brute.lost += unmoved && companion_too && layout.weights != WeightStorage::Stochastic;
          }
          EXPECT_EQ(counts.nonzero, brute.nonzero);
          EXPECT_EQ(counts.working_unmoved, brute.working_unmoved);
          EXPECT_EQ(counts.lost, brute.lost);
          EXPECT_GT(counts.working_unmoved, 0u) << "something has to stall";
          EXPECT_LT(counts.working_unmoved, counts.nonzero) << "something has to move";
          ASSERT_FALSE(HasFailure()) << table->isa << " " << describe(layout, optimizer);
        }
}

}  // namespace
}  // namespace halfstep
