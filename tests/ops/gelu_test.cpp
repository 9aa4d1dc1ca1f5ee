// GELU by tanh of low tensors inside an AutocastScope.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace gelu_test {

constexpr int64_t kRows = 150, kWidth = 96, kBytes = kRows * kWidth * 2;

struct Result {
  at::Tensor output, grad;
};

at::Tensor some_values(at::ScalarType type, int64_t rows = kRows) {
  at::manual_seed(7);
  return (at::randn({rows, kWidth}) * 3).to(type);
}

/// Of values in a type, with the gradient of a weighted sum.
Result result_of(const at::Tensor& values, at::ScalarType type, bool in_scope) {
  const at::Tensor x = values.to(type).detach().requires_grad_();
  at::Tensor output;
  {
    std::optional<AutocastScope> scope;
    if (in_scope) scope.emplace(type, OpPolicy::standard(), kAnyMachine);
    output = at::gelu(x, "tanh");
  }
  const at::Tensor weights = at::linspace(-1, 1, output.numel()).to(values.scalar_type());
  const auto grads =
      torch::autograd::grad({output}, {x}, {weights.reshape(output.sizes()).to(output.scalar_type())});
  return {output.detach(), grads[0]};
}

// The roundings inside are those of tests/kernels/pointwise_test.cpp, below 2^-20 for |x| < 16; then one
// rounding to the low type, of half a unit.
TEST(LowGelu, IsFp64sValueRoundedOnce) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    const at::Tensor values = some_values(low);
    const Result here = result_of(values, low, true), exact = result_of(values, at::kDouble, false);
    const double half_unit = low == at::kBFloat16 ? 0x1p-8 : 0x1p-11, smallest = 0x1p-25;
    const auto expect_near = [&](const at::Tensor& made, const at::Tensor& value) {
      EXPECT_EQ(made.scalar_type(), low);
      const at::Tensor bound = value.abs() * (half_unit * 1.01) + 0x1p-20 + smallest;
      EXPECT_TRUE(((made.to(at::kDouble) - value).abs() <= bound).all().item<bool>()) << low;
    };
    expect_near(here.output, exact.output);
    expect_near(here.grad, exact.grad);
  }
}

// LibTorch adds 1 to a tanh of nearly -1: its tail of negative inputs has few digits.
TEST(LowGelu, IsAsCloseAsLibTorchsAndItsTailIsCloser) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    const auto off = [&](const at::Tensor& values, bool in_scope, bool of_grad) {
      const Result made = result_of(values, low, in_scope), exact = result_of(values, at::kDouble, false);
      const at::Tensor &here = of_grad ? made.grad : made.output,
                       &value = of_grad ? exact.grad : exact.output;
      return ((here.to(at::kDouble) - value).norm() / value.norm()).item<double>();
    };
    const at::Tensor values = some_values(low);
    // Both are at one rounding: which way a few elements near a tie go is chance.
    for (const bool of_grad : {false, true})
      EXPECT_LE(off(values, true, of_grad), 1.02 * off(values, false, of_grad)) << low;
  }
  const at::Tensor tail = at::linspace(-5, -4.5, kRows * kWidth).view({kRows, kWidth}).to(at::kBFloat16);
  const at::Tensor exact = result_of(tail, at::kDouble, false).output;
  const auto off = [&](bool in_scope) {
    const at::Tensor made = result_of(tail, at::kBFloat16, in_scope).output.to(at::kDouble);
    return ((made - exact).norm() / exact.norm()).item<double>();
  };
  EXPECT_LT(off(true), 0x1p-8);
  EXPECT_GT(off(false), 0x1p-7);
}

TEST(LowGelu, HasTheSameBitsWithAnyNumberOfThreads) {
  const at::Tensor values = some_values(at::kBFloat16, 3000);
  const int threads = at::get_num_threads();
  std::vector<Result> results;
  for (const int count : {1, 2, 4}) {
    at::set_num_threads(count);
    results.push_back(result_of(values, at::kBFloat16, true));
  }
  at::set_num_threads(threads);
  for (const Result& other : results) {
    EXPECT_TRUE(at::equal(results[0].output, other.output));
    EXPECT_TRUE(at::equal(results[0].grad, other.grad));
  }
}

TEST(LowGelu, CanBeDifferentiatedTwice) {
  const at::Tensor values = some_values(at::kHalf, 4);
  const auto second = [&](at::ScalarType type) {
    const at::Tensor x = values.to(type).detach().requires_grad_();
    std::optional<AutocastScope> scope;
    if (type == at::kHalf) scope.emplace(type, OpPolicy::standard(), kAnyMachine);
    const at::Tensor loss = at::gelu(x, "tanh").to(at::kDouble).sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].to(at::kDouble).square().sum()}, {x})[0];
  };
  const at::Tensor here = second(at::kHalf), exact = second(at::kDouble);
  // The first gradient is rounded, doubled and rounded, and the second rounded: three half units.
  EXPECT_LE((here.to(at::kDouble) - exact).abs().max().item<double>(),
            4 * 0x1p-11 * exact.abs().max().item<double>());
}

/// Products before and behind; all gradients.
std::vector<at::Tensor> gradients_of_block(bool repeat, int64_t& live) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
  std::vector<at::Tensor> leaves{x};
  for (int i = 0; i < 2; ++i)
    leaves.push_back(at::randn({kWidth, kWidth}).div_(8).to(at::kBFloat16).requires_grad_());
  LiveBytes bytes;
  at::Tensor y;
  {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(),
                              {.allow_emulated = true, .repeat_outputs = repeat});
    y = at::linear(at::gelu(at::linear(x, leaves[1]), "tanh"), leaves[2]);
  }
  live = bytes.live();
  return torch::autograd::grad({y.pow(2).sum()}, leaves);
}

TEST(LowGelu, TheProductBehindItKeepsItsInputAndComputesItAgainWithTheSameBits) {
  int64_t repeated_bytes = 0, kept_bytes = 0;
  const auto repeated = gradients_of_block(true, repeated_bytes),
             kept = gradients_of_block(false, kept_bytes);
  EXPECT_EQ(repeated_bytes, 2 * kBytes) << "GELU's input and the block's output";
  EXPECT_EQ(kept_bytes, 3 * kBytes);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_GT(kept[i].abs().max().item<float>(), 0);
    EXPECT_TRUE(at::equal(repeated[i], kept[i])) << i;
  }
}

}  // namespace gelu_test
}  // namespace halfstep::testing
