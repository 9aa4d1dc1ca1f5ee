// Products and convolutions of low operands, computed in FP32. On every machine: whether it is done where
// nobody asks depends on the processor.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace products_in_fp32_test {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> shapes;
  Tensor (*call)(const Tensors&);
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"linear",
       {{3, 5, 16}, {24, 16}, {24}},
       [](const Tensors& in) { return at::linear(in[0], in[1], in[2]); }},
      {"addmm", {{24}, {7, 16}, {16, 24}}, [](const Tensors& in) { return at::addmm(in[0], in[1], in[2]); }},
      {"mm of a transpose", {{7, 16}, {24, 16}}, [](const Tensors& in) { return at::mm(in[0], in[1].t()); }},
      {"matmul",
       {{2, 3, 7, 16}, {2, 3, 9, 16}},
       [](const Tensors& in) { return at::matmul(in[0], in[1].transpose(-1, -2)); }},
      {"matmul of heads",
       {{2, 7, 3, 16}, {2, 7, 3, 16}},
       [](const Tensors& in) { return at::matmul(in[0].transpose(1, 2), in[1].permute({0, 2, 3, 1})); }},
      {"linear of a permuted input",
       {{5, 3, 16}, {24, 16}},
       [](const Tensors& in) { return at::linear(in[0].transpose(0, 1), in[1]); }},
      {"bmm", {{3, 7, 16}, {3, 16, 5}}, [](const Tensors& in) { return at::bmm(in[0], in[1]); }},
      {"baddbmm",
       {{3, 7, 5}, {3, 7, 16}, {3, 16, 5}},
       [](const Tensors& in) { return at::baddbmm(in[0], in[1], in[2]); }},
      {"addbmm",
       {{7, 5}, {3, 7, 16}, {3, 16, 5}},
       [](const Tensors& in) { return at::addbmm(in[0], in[1], in[2]); }},
      {"mv", {{7, 16}, {16}}, [](const Tensors& in) { return at::mv(in[0], in[1]); }},
      {"addmv", {{7}, {7, 16}, {16}}, [](const Tensors& in) { return at::addmv(in[0], in[1], in[2]); }},
      {"conv1d",
       {{2, 4, 9}, {6, 4, 3}, {6}},
       [](const Tensors& in) { return at::conv1d(in[0], in[1], in[2]); }},
      {"conv2d",
       {{2, 4, 9, 9}, {6, 4, 3, 3}, {6}},
       [](const Tensors& in) { return at::conv2d(in[0], in[1], in[2]); }},
      {"conv_transpose2d",
       {{2, 4, 5, 5}, {4, 6, 3, 3}, {6}},
       [](const Tensors& in) { return at::conv_transpose2d(in[0], in[1], in[2]); }},
  };
  return all;
}

AutocastScope scope_of(at::ScalarType low, bool in_fp32) {
  return AutocastScope(low, OpPolicy::standard(), {.allow_emulated = true, .products_in_fp32 = in_fp32});
}

Tensors inputs_of(const Case& each, at::ScalarType type) {
  at::manual_seed(5);
  Tensors inputs;
  for (const auto& shape : each.shapes) inputs.push_back(at::randn(shape).to(type).requires_grad_());
  return inputs;
}

TEST(ProductsInFp32, AreTheFp32OperationOnLowOperandsRoundedOnce) {
  at::set_num_threads(1);  // sums in one order
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf})
    for (const Case& each : cases()) {
      const Tensors inputs = inputs_of(each, at::kFloat);
      Tensor output;
      {
        const auto scope = scope_of(low, /*in_fp32=*/true);
        output = each.call(inputs);
      }
      ASSERT_EQ(output.scalar_type(), low) << each.name;
      const Tensor grad = at::randn(output.sizes()).to(low);
      torch::autograd::backward({output}, {grad});

      Tensors rounded;
      for (const Tensor& input : inputs)
        rounded.push_back(input.detach().to(low).to(at::kFloat).requires_grad_());
      const Tensor expected = each.call(rounded);
      torch::autograd::backward({expected}, {grad.to(at::kFloat)});
      EXPECT_TRUE(bit_equal(output.detach(), expected.detach().to(low))) << each.name << ' ' << low;
      for (std::size_t i = 0; i < inputs.size(); ++i)
        EXPECT_TRUE(bit_equal(inputs[i].grad(), rounded[i].grad().to(low).to(at::kFloat)))
            << each.name << ' ' << low << ", gradient " << i;
    }
}

TEST(ProductsInFp32, KeepForBackwardWhatLowOnesKeep) {
  for (const Case& each : cases()) {
    const auto kept = [&](bool in_fp32, bool as_parameters) {
      const Tensors leaves = inputs_of(each, at::kBFloat16);
      Tensors inputs;
      for (const Tensor& leaf : leaves) inputs.push_back(as_parameters ? leaf : leaf * 2);
      const LiveBytes bytes;
      const auto scope = scope_of(at::kBFloat16, in_fp32);
      const Tensor output = each.call(inputs);
      return bytes.live();
    };
    EXPECT_LE(kept(true, false), kept(false, false)) << each.name;
    EXPECT_LE(kept(true, true), kept(false, true)) << each.name << " of parameters";
  }
}

TEST(ProductsInFp32, DoNotShowParametersToActivationCompression) {
  const Tensor weight = at::randn({64, 64}).to(at::kBFloat16).requires_grad_(),
               x = at::randn({8, 64}).requires_grad_();
  const auto input_gradient = [&](bool compress) {
    std::optional<CompressedActivations> compressed;
    if (compress) compressed.emplace(Format::E4M3);
    const auto scope = scope_of(at::kBFloat16, /*in_fp32=*/true);
    return torch::autograd::grad({at::linear(x * 2, weight).sum()}, {x})[0];
  };
  EXPECT_TRUE(at::equal(input_gradient(true), input_gradient(false)));
}

TEST(ProductsInFp32, SeeAnOperandThatWasChangedBeforeBackward) {
  for (const bool parameter : {false, true}) {
    Tensor weight = at::randn({4, 4}).to(at::kBFloat16).requires_grad_(),
           x = (at::randn({4, 4}).to(at::kBFloat16).requires_grad_()) * 2;
    Tensor y;
    {
      const auto scope = scope_of(at::kBFloat16, /*in_fp32=*/true);
      y = at::linear(x, weight);
    }
    {
      const torch::NoGradGuard no_grad;
      (parameter ? weight : x).mul_(2);
    }
    EXPECT_NE(error_of([&] { y.sum().backward(); }).find("changed in place"), std::string::npos);
  }
}

TEST(ProductsInFp32, LeaveWhatIsNotLoweredAlone) {
  const auto scope = scope_of(at::kBFloat16, /*in_fp32=*/true);
  const Tensor whole = at::ones({3, 3}, at::kLong), wide = at::randn({3, 3}, at::kDouble);
  EXPECT_EQ(at::mm(whole, whole).scalar_type(), at::kLong);
  EXPECT_EQ(at::mm(wide, wide).scalar_type(), at::kDouble);
  EXPECT_TRUE(at::equal(at::mm(wide, wide), wide.mm(wide)));
}

// Two products, one inside the other's graph, and backward within the scope.
TEST(ProductsInFp32, GiveTheSameGradientsInsideTheScopeAndOutside) {
  const auto gradients = [](bool inside) {
    at::manual_seed(3);
    const Tensor a = at::randn({16, 16}).requires_grad_(), b = at::randn({16, 16}).requires_grad_();
    std::optional<AutocastScope> scope(std::in_place, at::kHalf, OpPolicy::standard(),
                                       AutocastOptions{.products_in_fp32 = true});
    const Tensor loss = at::linear(at::gelu(at::mm(a, b)), b).to(at::kFloat).square().mean();
    if (!inside) scope.reset();
    loss.backward();
    return std::pair(a.grad(), b.grad());
  };
  const auto [a, b] = gradients(true);
  const auto [other_a, other_b] = gradients(false);
  EXPECT_TRUE(at::equal(a, other_a));
  EXPECT_TRUE(at::equal(b, other_b));
}

}  // namespace products_in_fp32_test
}  // namespace halfstep::testing
