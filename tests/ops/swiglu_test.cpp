// halfstep::swiglu inside an AutocastScope and outside.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <halfstep/functions.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/error_of.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace swiglu_test {

constexpr int64_t kRows = 150, kWidth = 96, kBytes = kRows * kWidth * 2;

struct Result {
  at::Tensor output, gate_grad, up_grad;
};

struct Both {
  at::Tensor gate, up;
};

Both some_inputs(at::ScalarType type, int64_t rows = kRows) {
  at::manual_seed(7);
  return {(at::randn({rows, kWidth}) * 3).to(type), at::randn({rows, kWidth}).to(type)};
}

/// `function` of the inputs in a type, with the gradients of a weighted sum.
template <typename Function>
Result result_of(const Both& inputs, at::ScalarType type, const Function& function) {
  const at::Tensor gate = inputs.gate.to(type).detach().requires_grad_();
  const at::Tensor up = inputs.up.to(type).detach().requires_grad_();
  const at::Tensor output = function(gate, up);
  const at::Tensor weights = at::linspace(-1, 1, output.numel()).to(inputs.gate.scalar_type());
  const auto grads =
      torch::autograd::grad({output}, {gate, up}, {weights.reshape(output.sizes()).to(output.scalar_type())});
  return {output.detach(), grads[0], grads[1]};
}

Result in_scope(const Both& inputs) {
  const at::ScalarType type = inputs.gate.scalar_type();
  return result_of(inputs, type, [&](const at::Tensor& gate, const at::Tensor& up) {
    const AutocastScope scope(type, OpPolicy::standard(), kAnyMachine);
    return swiglu(gate, up);
  });
}

Result by_libtorch(const Both& inputs, at::ScalarType type) {
  return result_of(inputs, type,
                   [](const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; });
}

double largest(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// The roundings inside are those of tests/kernels/pointwise_test.cpp, below 2^-18 for gates of up to 16; then
// one rounding to the low type, of half a unit.
TEST(LowSwiglu, IsFp64sValueRoundedOnce) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    const Both inputs = some_inputs(low);
    const Result here = in_scope(inputs), exact = by_libtorch(inputs, at::kDouble);
    const double half_unit = low == at::kBFloat16 ? 0x1p-8 : 0x1p-11, smallest = 0x1p-25;
    const auto expect_near = [&](const at::Tensor& made, const at::Tensor& value) {
      EXPECT_EQ(made.scalar_type(), low);
      const at::Tensor bound = value.abs() * (half_unit * 1.01) + 0x1p-18 * 0x1p-3 + smallest;
      EXPECT_TRUE(((made.to(at::kDouble) - value).abs() <= bound).all().item<bool>());
    };
    expect_near(here.output, exact.output);
    expect_near(here.gate_grad, exact.gate_grad);
    expect_near(here.up_grad, exact.up_grad);
  }
}

// LibTorch rounds SiLU before the product, and the gradient of that rounded number.
TEST(LowSwiglu, IsCloserThanLibTorchsTwoOperations) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    const Both inputs = some_inputs(low);
    const Result here = in_scope(inputs), stock = by_libtorch(inputs, low),
                 exact = by_libtorch(inputs, at::kDouble);
    const auto off = [](const at::Tensor& made, const at::Tensor& value) {
      return (made.to(at::kDouble) - value).norm().item<double>();
    };
    EXPECT_LT(off(here.output, exact.output), off(stock.output, exact.output));
    EXPECT_LT(off(here.gate_grad, exact.gate_grad), off(stock.gate_grad, exact.gate_grad));
    EXPECT_LT(off(here.up_grad, exact.up_grad), off(stock.up_grad, exact.up_grad));
  }
}

TEST(LowSwiglu, OutsideAScopeItIsLibTorchsTwoOperationsToTheBit) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const Both inputs = some_inputs(type);
    const Result here = result_of(inputs, type, swiglu), stock = by_libtorch(inputs, type);
    EXPECT_TRUE(at::equal(here.output, stock.output));
    EXPECT_TRUE(at::equal(here.gate_grad, stock.gate_grad));
    EXPECT_TRUE(at::equal(here.up_grad, stock.up_grad));
  }
}

TEST(LowSwiglu, HasTheSameBitsWithAnyNumberOfThreads) {
  const Both inputs = some_inputs(at::kBFloat16, 3000);
  const int threads = at::get_num_threads();
  std::vector<Result> results;
  for (const int count : {1, 2, 4}) {
    at::set_num_threads(count);
    results.push_back(in_scope(inputs));
  }
  at::set_num_threads(threads);
  for (const Result& other : results) {
    EXPECT_TRUE(at::equal(results[0].output, other.output));
    EXPECT_TRUE(at::equal(results[0].gate_grad, other.gate_grad));
    EXPECT_TRUE(at::equal(results[0].up_grad, other.up_grad));
  }
}

TEST(LowSwiglu, CanBeDifferentiatedTwice) {
  const Both inputs = some_inputs(at::kHalf, 4);
  const auto second = [&](at::ScalarType type) {
    const at::Tensor gate = inputs.gate.to(type).detach().requires_grad_();
    const at::Tensor up = inputs.up.to(type).detach().requires_grad_();
    std::optional<AutocastScope> scope;
    if (type == at::kHalf) scope.emplace(type, OpPolicy::standard(), kAnyMachine);
    const at::Tensor loss = swiglu(gate, up).to(at::kDouble).sum();
    const auto first = torch::autograd::grad({loss}, {gate, up}, {}, true, /*create_graph=*/true);
    const at::Tensor squares = (first[0].to(at::kDouble) * first[1].to(at::kDouble)).sum();
    return torch::autograd::grad({squares}, {gate, up});
  };
  const auto here = second(at::kHalf), exact = second(at::kDouble);
  for (int i = 0; i < 2; ++i)
    EXPECT_LE(largest(here[i], exact[i]), 8 * 0x1p-11 * exact[i].abs().max().item<double>());
}

/// Products before and behind, as in a feed-forward part; all gradients.
std::vector<at::Tensor> gradients_of_block(bool repeat, int64_t* live = nullptr,
                                           const std::function<void(at::Tensor&)>& before_product = {}) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
  std::vector<at::Tensor> leaves{x};
  for (int i = 0; i < 3; ++i)
    leaves.push_back(at::randn({kWidth, kWidth}).div_(8).to(at::kBFloat16).requires_grad_());
  std::optional<LiveBytes> bytes;
  if (live) bytes.emplace();
  at::Tensor y;
  {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(),
                              {.allow_emulated = true, .repeat_outputs = repeat});
    at::Tensor h = swiglu(at::linear(x, leaves[1]), at::linear(x, leaves[2]));
    if (before_product) before_product(h);
    y = at::linear(h, leaves[3]);
  }
  if (live) *live = bytes->live();
  return torch::autograd::grad({y.pow(2).sum()}, leaves);
}

TEST(LowSwiglu, TheProductBehindItKeepsItsInputsAndComputesItAgainWithTheSameBits) {
  int64_t repeated_bytes = 0, kept_bytes = 0;
  const auto repeated = gradients_of_block(true, &repeated_bytes),
             kept = gradients_of_block(false, &kept_bytes);
  EXPECT_EQ(repeated_bytes, 3 * kBytes) << "gate, up and the block's output";
  EXPECT_EQ(kept_bytes, 4 * kBytes);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_GT(kept[i].abs().max().item<float>(), 0);
    EXPECT_TRUE(at::equal(repeated[i], kept[i])) << i;
  }
}

TEST(LowSwiglu, NothingIsHeldAfterBackward) {
  const LiveBytes bytes;
  (void)gradients_of_block(true);
  EXPECT_EQ(bytes.live(), 0);
}

TEST(LowSwiglu, AnOutputThatWasChangedBeforeTheProductIsKept) {
  const auto change = [](at::Tensor& h) { h.mul_(3); };
  const auto repeated = gradients_of_block(true, nullptr, change),
             kept = gradients_of_block(false, nullptr, change);
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(repeated[i], kept[i])) << i;
}

TEST(LowSwiglu, AnInputThatWasChangedBeforeBackwardIsAnError) {
  for (const int which : {0, 1}) {
    const at::Tensor inputs[] = {at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2,
                                 at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2};
    const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
    at::Tensor y;
    {
      const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
      y = at::linear(swiglu(inputs[0], inputs[1]), weight).sum();
    }
    {
      const at::NoGradGuard no_grad;
      inputs[which].add_(1);
    }
    EXPECT_NE(
        error_of([&] { (void)torch::autograd::grad({y}, {weight}); }).find("changed in place after it was"),
        std::string::npos)
        << which;
  }
}

TEST(LowSwiglu, CompressedInputsServeTheProductBehindItToo) {
  const auto live = [](bool repeat) {
    const CompressedActivations compress(Format::E4M3);
    int64_t bytes = 0;
    (void)gradients_of_block(repeat, &bytes);
    return bytes;
  };
  // Codes of gate and up take half of their bytes, with exponents of blocks; leaves and the output stay.
  EXPECT_LT(live(true), kBytes * (1 + 2 * 0.55));
  EXPECT_GT(live(false), kBytes * (1 + 3 * 0.5));
}

}  // namespace swiglu_test
}  // namespace halfstep::testing
