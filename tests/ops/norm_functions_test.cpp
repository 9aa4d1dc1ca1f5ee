// halfstep::rms_norm and halfstep::layer_norm inside an AutocastScope and outside.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <halfstep/functions.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace norm_functions_test {

constexpr int64_t kRows = 150, kWidth = 96, kElements = kRows * kWidth;
constexpr double kEps = 1e-3;

using Tensors = std::vector<at::Tensor>;  // rows, gain, bias
using Norm = at::Tensor (*)(const Tensors&);

at::Tensor rms(const Tensors& given) { return rms_norm(given[0], given[1], kEps); }
at::Tensor layer(const Tensors& given) { return layer_norm(given[0], given[1], given[2], kEps); }
at::Tensor stock_rms(const Tensors& given) { return at::rms_norm(given[0], {kWidth}, given[1], kEps); }
at::Tensor stock_layer(const Tensors& given) {
  return at::layer_norm(given[0], {kWidth}, given[1], given[2], kEps);
}

struct Kind {
  const char* name;
  Norm ours, stock;
  std::size_t inputs;
};
constexpr Kind kKinds[] = {{"rms_norm", rms, stock_rms, 2}, {"layer_norm", layer, stock_layer, 3}};

Tensors some(const Kind& kind, at::ScalarType rows, at::ScalarType others) {
  at::manual_seed(7);
  Tensors given{(at::randn({kRows, kWidth}) * 3 + 1).to(rows), at::linspace(0.5, 1.5, kWidth).to(others),
                at::linspace(-1, 1, kWidth).to(others)};
  given.resize(kind.inputs);
  return given;
}

/// The output and all gradients, of the same numbers in another type; the output's gradient is low.
Tensors result_of(Norm norm, const Tensors& given, std::optional<at::ScalarType> type = {}) {
  Tensors leaves;
  for (const at::Tensor& tensor : given)
    leaves.push_back(tensor.to(type.value_or(tensor.scalar_type())).detach().requires_grad_());
  const at::Tensor output = norm(leaves);
  const at::Tensor grad =
      at::linspace(-1, 1, output.numel()).reshape(output.sizes()).to(given[0].scalar_type());
  Tensors results = torch::autograd::grad({output}, leaves, {grad.to(output.scalar_type())});
  results.insert(results.begin(), output.detach());
  return results;
}

Tensors in_scope(Norm norm, const Tensors& given) {
  const AutocastScope scope(given[0].scalar_type(), OpPolicy::standard(), kAnyMachine);
  return result_of(norm, given);
}

double largest(const at::Tensor& tensor) { return tensor.to(at::kDouble).abs().max().item<double>(); }

// Rows, and all that has their type, are rounded once: half a unit of the largest number. Inside it is FP32's
// arithmetic over a row of 96 numbers, and over 150 rows for the gradients of gain and bias: 2^-16 of the
// largest.
TEST(NormFunctions, AreFp64sNormRoundedOnce) {
  for (const Kind& kind : kKinds)
    for (const auto low : {at::kBFloat16, at::kHalf})
      for (const auto others : {at::kFloat, low}) {
        const Tensors given = some(kind, low, others), here = in_scope(kind.ours, given),
                      exact = result_of(kind.ours, given, at::kDouble);
        const double half_unit = low == at::kBFloat16 ? 0x1p-9 : 0x1p-12;
        for (std::size_t i = 0; i < here.size(); ++i) {
          EXPECT_EQ(here[i].scalar_type(), i == 0 ? low : given[i - 1].scalar_type()) << kind.name << i;
          const double rounding = here[i].scalar_type() == at::kFloat ? 0 : half_unit;
          // The largest number may lie just above a power of two: half a unit is up to twice half_unit of it.
          EXPECT_LE(largest(here[i].to(at::kDouble) - exact[i]), (2 * rounding + 0x1p-16) * largest(exact[i]))
              << kind.name << ", " << low << ", result " << i;
        }
      }
}

// What a product behind aten's norm is given inside a scope.
TEST(NormFunctions, RoundTheOutputThatAtensNormHasInAScope) {
  for (const Kind& kind : kKinds)
    for (const auto low : {at::kBFloat16, at::kHalf}) {
      const Tensors given = some(kind, low, at::kFloat);
      const at::Tensor fp32 = in_scope(kind.stock, given)[0];
      ASSERT_EQ(fp32.scalar_type(), at::kFloat);
      const at::Tensor ours = in_scope(kind.ours, given)[0];
      // LibTorch's two kernels of layer norm sum in another order: a number near a tie may go the other way.
      EXPECT_GE(ours.eq(fp32.to(low)).sum().item<int64_t>(),
                kind.ours == rms ? kElements : kElements - kElements / 500)
          << kind.name;
    }
}

TEST(NormFunctions, OutsideAScopeTheyAreLibTorchsToTheBit) {
  for (const Kind& kind : kKinds)
    for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const Tensors given = some(kind, type, type), ours = result_of(kind.ours, given),
                    stock = result_of(kind.stock, given);
      for (std::size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(at::equal(ours[i], stock[i])) << kind.name << i;
    }
}

TEST(NormFunctions, OfFp32RowsAreFp32) {
  for (const Kind& kind : kKinds) {
    const Tensors given = some(kind, at::kFloat, at::kFloat);
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    EXPECT_TRUE(at::equal(kind.ours(given), kind.stock(given))) << kind.name;
  }
}

TEST(NormFunctions, HaveTheSameBitsWithAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const Kind& kind : kKinds) {
    const Tensors given = some(kind, at::kBFloat16, at::kFloat);
    std::vector<Tensors> results;
    for (const int threads : {1, 2, 4}) {
      at::set_num_threads(threads);
      results.push_back(in_scope(kind.ours, given));
    }
    for (const Tensors& other : results)
      for (std::size_t i = 0; i < other.size(); ++i)
        EXPECT_TRUE(at::equal(results[0][i], other[i])) << kind.name << i;
  }
  at::set_num_threads(before);
}

TEST(NormFunctions, CanBeDifferentiatedTwice) {
  for (const Kind& kind : kKinds) {
    const auto second = [&](at::ScalarType type) {
      Tensors given = some(kind, at::kHalf, at::kFloat);
      for (at::Tensor& tensor : given) tensor = tensor.to(type == at::kDouble ? type : tensor.scalar_type());
      given[0] = given[0].narrow(0, 0, 4).contiguous().requires_grad_();
      std::optional<AutocastScope> scope;
      if (type == at::kHalf) scope.emplace(at::kHalf, OpPolicy::standard(), kAnyMachine);
      const at::Tensor loss = kind.ours(given).to(type == at::kDouble ? type : at::kFloat).pow(3).sum();
      const at::Tensor first = torch::autograd::grad({loss}, {given[0]}, {}, true, /*create_graph=*/true)[0];
      return torch::autograd::grad({first.to(at::kDouble).pow(2).sum()}, {given[0]})[0].to(at::kDouble);
    };
    const at::Tensor exact = second(at::kDouble);
    // Roundings of the output, its gradient and both of the input's, each once or twice over.
    EXPECT_LE(largest(second(at::kHalf) - exact), 16 * 0x1p-11 * largest(exact)) << kind.name;
  }
}

// Backward of the norm keeps the rows; a product behind it computes its operand again from them.
TEST(NormFunctions, AProductBehindKeepsNoOutput) {
  for (const Kind& kind : kKinds) {
    const Tensors given = some(kind, at::kBFloat16, at::kFloat);
    const at::Tensor leaf = given[0].clone().requires_grad_();
    const at::Tensor x = leaf + 0;  // a leaf may be changed before backward
    const at::Tensor matrix = at::randn({8, kWidth}).to(at::kBFloat16).requires_grad_();
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    const LiveBytes bytes;
    Tensors with = given;
    with[0] = x;
    const at::Tensor product = at::linear(kind.ours(with), matrix);
    // The product's output of 8 columns, and two FP32 numbers a row at most.
    EXPECT_LT(bytes.live(), kRows * (8 * 2 + 2 * 4) + 4096) << kind.name;
    product.sum().backward();
    EXPECT_TRUE(leaf.grad().defined());
  }
}

}  // namespace norm_functions_test
}  // namespace halfstep::testing
