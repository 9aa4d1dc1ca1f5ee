// halfstep::rotary inside an AutocastScope and outside.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <halfstep/functions.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace rotary_test {

constexpr int64_t kBatch = 2, kLength = 9, kHeads = 3;

struct Angles {
  at::Tensor cos, sin;
};

Angles angles_of(at::IntArrayRef sizes) {
  const at::Tensor angles = at::randn(sizes) * 3;
  return {angles.cos(), angles.sin()};
}

/// The operations of a model that users write.
at::Tensor by_libtorch(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
  return (x * cos + at::cat({-second, first}, -1) * sin).to(x.scalar_type());
}

using Function = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&);

struct Result {
  at::Tensor output, grad;
};

Result result_of(Function function, const at::Tensor& given, const Angles& angles, at::ScalarType type) {
  const at::Tensor x = given.to(type).detach().requires_grad_();
  const at::Tensor output = function(x, angles.cos.to(type == at::kDouble ? type : at::kFloat),
                                     angles.sin.to(type == at::kDouble ? type : at::kFloat));
  const at::Tensor grads = at::linspace(-1, 1, x.numel()).to(given.scalar_type()).reshape(x.sizes());
  return {output.detach(), torch::autograd::grad({output}, {x}, {grads.to(type)})[0]};
}

Result in_scope(const at::Tensor& x, const Angles& angles) {
  const AutocastScope scope(x.scalar_type(), OpPolicy::standard(), kAnyMachine);
  return result_of(rotary, x, angles, x.scalar_type());
}

/// Heads in the orders in memory that models make.
std::vector<at::Tensor> some_heads(at::ScalarType type, int64_t head_size, int64_t length = kLength) {
  at::manual_seed(4);
  const at::Tensor rows = at::randn({kBatch, length, kHeads, head_size}).to(type);
  const at::Tensor with_values = at::randn({kBatch, length, 2 * kHeads, head_size}).to(type);
  return {rows.transpose(1, 2), rows.transpose(1, 2).contiguous(),
          with_values.transpose(1, 2).narrow(1, 0, kHeads)};
}

TEST(LowRotary, ForwardHasTheBitsOfLibTorchsChain) {
  for (const auto low : {at::kBFloat16, at::kHalf})
    for (const int64_t head_size : {2, 24, 64, 128})
      for (const at::Tensor& x : some_heads(low, head_size))
        for (const bool by_text : {false, true}) {
          const Angles angles =
              by_text ? angles_of({kBatch, 1, kLength, head_size}) : angles_of({kLength, head_size});
          const Result here = in_scope(x, angles), stock = result_of(by_libtorch, x, angles, low);
          EXPECT_EQ(here.output.scalar_type(), low);
          EXPECT_TRUE(at::equal(here.output, stock.output)) << head_size;
        }
}

// Two products and a sum in FP32, and one rounding to the low type, of half a unit; angles are FP32's in
// both.
TEST(LowRotary, TheGradientIsFp64sRoundedOnce) {
  for (const auto low : {at::kBFloat16, at::kHalf})
    for (const at::Tensor& x : some_heads(low, 64)) {
      const Angles angles = angles_of({kLength, 64});
      const Result here = in_scope(x, angles), exact = result_of(by_libtorch, x, angles, at::kDouble);
      EXPECT_EQ(here.grad.scalar_type(), low);
      const double half_unit = low == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
      const at::Tensor bound = exact.grad.abs() * (half_unit * 1.01) + 3 * 0x1p-24 * 2 + 0x1p-25;
      EXPECT_TRUE(((here.grad.to(at::kDouble) - exact.grad).abs() <= bound).all().item<bool>());
    }
}

TEST(LowRotary, OutputAndGradientLieInTheOrderOfTheHeads) {
  const auto heads = some_heads(at::kBFloat16, 64);
  const Angles angles = angles_of({kLength, 64});
  for (const at::Tensor& x : {heads[0], heads[1]}) {
    const Result here = in_scope(x, angles);
    EXPECT_EQ(here.output.strides(), x.strides());
    EXPECT_EQ(here.grad.strides(), x.strides());
  }
}

TEST(LowRotary, OutsideAScopeItIsLibTorchsChainToTheBit) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const at::Tensor& x : some_heads(type, 24)) {
      const Angles angles = angles_of({kLength, 24});
      const Result here = result_of(rotary, x, angles, type), stock = result_of(by_libtorch, x, angles, type);
      EXPECT_TRUE(at::equal(here.output, stock.output));
      EXPECT_TRUE(at::equal(here.grad, stock.grad));
    }
}

TEST(LowRotary, HasTheSameBitsWithAnyNumberOfThreads) {
  const at::Tensor x = some_heads(at::kBFloat16, 64, 700)[0];
  const Angles angles = angles_of({700, 64});
  const int threads = at::get_num_threads();
  std::vector<Result> results;
  for (const int count : {1, 2, 4}) {
    at::set_num_threads(count);
    results.push_back(in_scope(x, angles));
  }
  at::set_num_threads(threads);
  for (const Result& other : results) {
    EXPECT_TRUE(at::equal(results[0].output, other.output));
    EXPECT_TRUE(at::equal(results[0].grad, other.grad));
  }
}

TEST(LowRotary, KeepsNothingButTheAngles) {
  const at::Tensor x = some_heads(at::kBFloat16, 64)[0].detach().requires_grad_();
  const Angles angles = angles_of({kLength, 64});
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  const LiveBytes bytes;
  const at::Tensor output = rotary(x, angles.cos, angles.sin);
  EXPECT_EQ(bytes.live(), output.numel() * 2);
}

TEST(LowRotary, CanBeDifferentiatedTwice) {
  const at::Tensor x = some_heads(at::kHalf, 8)[0];
  const Angles angles = angles_of({kLength, 8});
  const auto second = [&](at::ScalarType type) {
    const at::Tensor leaf = x.to(type).detach().requires_grad_();
    std::optional<AutocastScope> scope;
    if (type == at::kHalf) scope.emplace(type, OpPolicy::standard(), kAnyMachine);
    const at::ScalarType of_angles = type == at::kHalf ? at::kFloat : type;
    const at::Tensor turned = rotary(leaf, angles.cos.to(of_angles), angles.sin.to(of_angles));
    const at::Tensor first = torch::autograd::grad({turned.to(at::kDouble).pow(3).sum()}, {leaf}, {}, true,
                                                   /*create_graph=*/true)[0];
    return torch::autograd::grad({first.to(at::kDouble).pow(2).sum()}, {leaf})[0].to(at::kDouble);
  };
  const at::Tensor exact = second(at::kDouble);
  EXPECT_LE((second(at::kHalf) - exact).abs().max().item<double>(),
            16 * 0x1p-11 * exact.abs().max().item<double>());
}

}  // namespace rotary_test
}  // namespace halfstep::testing
