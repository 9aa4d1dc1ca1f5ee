// The arrays of one tensor in any layout, with a guard around each, and the optimizers over them.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/update.h"

namespace halfstep::testing_state {

enum class Optimizer { AdamW, SgdPlain, SgdMomentum, SgdNesterov };
inline constexpr Optimizer kOptimizers[] = {Optimizer::AdamW, Optimizer::SgdPlain, Optimizer::SgdMomentum,
                                            Optimizer::SgdNesterov};

inline std::vector<UpdateLayout> all_layouts() {
  std::vector<UpdateLayout> layouts;
  for (Format grad : {Format::FP32, Format::BF16, Format::FP16})
    for (MomentStorage moments : {MomentStorage::Fp32, MomentStorage::Bf16, MomentStorage::Blockwise8}) {
      layouts.push_back({grad, Format::FP32, WeightStorage::Fp32, moments});
      layouts.push_back({grad, Format::BF16, WeightStorage::SplitMaster, moments});
      for (Format working : {Format::BF16, Format::FP16})
        for (WeightStorage weights : {WeightStorage::Fp32Master, WeightStorage::Kahan,
                                      WeightStorage::Stochastic, WeightStorage::Nearest})
          layouts.push_back({grad, working, weights, moments});
    }
  return layouts;
}

inline std::string describe(const UpdateLayout& layout, Optimizer optimizer) {
  return "weights " + std::to_string(int(layout.weights)) + " " + traits(layout.working).name + " moments " +
         std::to_string(int(layout.moments)) + " grads " + traits(layout.grad).name + " optimizer " +
         std::to_string(int(optimizer));
}

/// Elements of a fixed size, `offset` of them from an aligned place, with guards on both sides.
class Array {
 public:
  Array(std::size_t element_bytes, std::size_t count, std::size_t offset)
      : element_bytes(element_bytes), count(count), offset(offset) {
    bytes.assign((offset + count + kGuardElements) * element_bytes, kGuard);
    if (count && element_bytes) std::memset(at(0), 0, count * element_bytes);
  }
  void* at(std::size_t i) { return element_bytes ? bytes.data() + (offset + i) * element_bytes : nullptr; }
  std::uint32_t code(std::size_t i) const {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + (offset + i) * element_bytes, element_bytes);
    return word;
  }
  float value(std::size_t i) const { return std::bit_cast<float>(code(i)); }
  void set(std::size_t i, std::uint32_t code) { std::memcpy(at(i), &code, element_bytes); }
  bool guards_hold() const {
    for (std::size_t b = 0; b < bytes.size(); ++b)
      if ((b < offset * element_bytes || b >= (offset + count) * element_bytes) && bytes[b] != kGuard)
        return false;
    return true;
  }

  std::size_t element_bytes, count, offset;

 private:
  static constexpr std::uint8_t kGuard = 0xa5;
  static constexpr std::size_t kGuardElements = 64;
  std::vector<std::uint8_t> bytes;
};

inline std::size_t bytes_of(Format format) { return format == Format::FP32 ? 4 : 2; }

inline std::uint32_t code_of(float value, Format format) {
  return format == Format::FP32 ? std::bit_cast<std::uint32_t>(value)
                                : encode_float(value, format, {.overflow = Overflow::NonFinite});
}

inline double value_of(std::uint32_t code, Format format) {
  return format == Format::FP32 ? std::bit_cast<float>(code) : decode_float(code, format);
}

inline std::size_t companion_bytes(WeightStorage storage) {
  switch (storage) {
    case WeightStorage::Fp32Master:
      return 4;
    case WeightStorage::SplitMaster:
    case WeightStorage::Kahan:
      return 2;
    default:
      return 0;
  }
}

inline std::size_t moment_bytes(MomentStorage storage) {
  return storage == MomentStorage::Fp32 ? 4 : storage == MomentStorage::Bf16 ? 2 : 1;
}

struct State {
  State(const UpdateLayout& layout, Optimizer optimizer, std::size_t count, std::size_t offset = 0)
      : layout(layout),
        optimizer(optimizer),
        count(count),
        working(bytes_of(layout.working), count, offset),
        companion(companion_bytes(layout.weights), count, offset),
        grad(bytes_of(layout.grad), count, offset),
        first(optimizer == Optimizer::SgdPlain ? 0 : moment_bytes(layout.moments), count, offset),
        second(optimizer == Optimizer::AdamW ? moment_bytes(layout.moments) : 0, count, offset),
        first_scale(4, blocks(), 0),
        second_scale(4, blocks(), 0) {}

  std::size_t blocks() const { return (count + kMomentBlockElements - 1) / kMomentBlockElements; }

  void set_weights(const std::vector<float>& weights) {
    store_weights(layout, weights.data(), working.at(0), companion.at(0), count, kScalarKernels);
  }
  void set_grads(const std::vector<float>& grads) {
    for (std::size_t i = 0; i < count; ++i) grad.set(i, code_of(grads[i], layout.grad));
  }

  UpdateRun run(std::size_t begin, std::size_t elements, std::uint64_t first_element) {
    const std::size_t block = begin / kMomentBlockElements;
    return {.working = working.at(begin),
            .companion = companion.at(begin),
            .grad = grad.at(begin),
            .first_moment = first.at(begin),
            .second_moment = second.at(begin),
            .first_scale = static_cast<float*>(first_scale.at(block)),
            .second_scale = static_cast<float*>(second_scale.at(block)),
            .count = elements,
            .first_element = first_element + begin};
  }

  std::vector<Array*> arrays() {
    return {&working, &companion, &grad, &first, &second, &first_scale, &second_scale};
  }

  UpdateLayout layout;
  Optimizer optimizer;
  std::size_t count;
  Array working, companion, grad, first, second, first_scale, second_scale;
};

/// What a test sets of a step; the rest follows from the optimizer.
struct Rates {
  double learning_rate = 1e-2, weight_decay = 0.1;
  float grad_multiplier = 0.37f;
  double beta1 = 0.9, beta2 = 0.99, eps = 1e-8;   // AdamW
  double momentum = 0.9, dampening = 0.1;         // SGD; Nesterov has no dampening
  StochasticKey random{.seed = 77, .tensor = 5};  // its step is set below
};

inline AdamWStep adamw_of(const Rates& rates, int step_number) {
  AdamWStep step = adamw_step({.learning_rate = rates.learning_rate,
                               .beta1 = rates.beta1,
                               .beta2 = rates.beta2,
                               .eps = rates.eps,
                               .weight_decay = rates.weight_decay},
                              step_number);
  step.grad_multiplier = rates.grad_multiplier;
  step.random = {rates.random.seed, rates.random.tensor, std::uint32_t(step_number)};
  return step;
}

inline SgdStep sgd_of(const Rates& rates, Optimizer optimizer, int step_number) {
  const bool plain = optimizer == Optimizer::SgdPlain, nesterov = optimizer == Optimizer::SgdNesterov;
  return {.grad_multiplier = rates.grad_multiplier,
          .learning_rate = rates.learning_rate,
          .momentum = plain ? 0 : rates.momentum,
          .dampening = nesterov ? 0 : rates.dampening,
          .weight_decay = rates.weight_decay,
          .nesterov = nesterov,
          .first = step_number == 1,
          .random = {rates.random.seed, rates.random.tensor, std::uint32_t(step_number)}};
}

/// One step over elements [begin, begin + elements), whose tensor begins `first_element` before element 0.
inline UpdateCounts update(State& state, const Rates& rates, int step_number, const KernelTable& table,
                           std::size_t begin, std::size_t elements, std::uint64_t first_element = 0) {
  const UpdateRun run = state.run(begin, elements, first_element);
  return state.optimizer == Optimizer::AdamW
             ? adamw_update(state.layout, adamw_of(rates, step_number), run, table)
             : sgd_update(state.layout, sgd_of(rates, state.optimizer, step_number), run, table);
}

inline UpdateCounts update(State& state, const Rates& rates, int step_number, const KernelTable& table) {
  return update(state, rates, step_number, table, 0, state.count);
}

/// Where arithmetic goes wrong.
enum class Values { Ordinary, Subnormal, Huge, Tiny, Mixed };
inline constexpr Values kValues[] = {Values::Ordinary, Values::Subnormal, Values::Huge, Values::Tiny,
                                     Values::Mixed};

inline std::vector<float> random_values(Values kind, std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-145, 127);
  std::vector<float> values(count);
  for (float& value : values) {
    const float x = normal(generator);
    const auto pick = generator() % 8;
    switch (kind) {
      case Values::Ordinary:
        value = x;
        break;
      case Values::Subnormal:
        value = x * 0x1p-138f;
        break;
      case Values::Huge:
        value = x * 0x1p126f;
        break;
      case Values::Tiny:
        value = x * 1e-18f;
        break;
      case Values::Mixed:
        value = pick == 0 ? 0.0f : pick == 1 ? -0.0f : std::copysign(std::exp2(exponent(generator)), x);
        break;
    }
  }
  return values;
}

}  // namespace halfstep::testing_state
