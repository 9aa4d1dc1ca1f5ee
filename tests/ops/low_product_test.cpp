// Products of BF16 rows inside an AutocastScope, on processors with AMX.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <halfstep/machine.h>
#include <torch/torch.h>

#include "support/live_bytes.h"
#include "tensor/update_path.h"

namespace halfstep::testing {
namespace low_product_test {

class LowProduct : public ::testing::Test {
 protected:
  void SetUp() override {
    if (inspect_machine().cpu.kernels != "amx")
      GTEST_SKIP() << "no AMX, or HALFSTEP_ISA asks for other loops";
  }
};

using Tensors = std::vector<at::Tensor>;

struct Way {
  const char* what;
  Tensors inputs;  // low
  std::function<at::Tensor(const Tensors&)> run;
};

std::vector<Way> ways() {
  at::manual_seed(4);
  const auto low = [](at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); };
  const at::Tensor x = low({150, 96}), weight = low({45, 96}), bias = low({45});
  return {
      {"linear", {x, weight, bias}, [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"linear of texts",
       {low({3, 50, 96}), weight},
       [](const Tensors& t) { return at::linear(t[0], t[1]); }},
      {"linear of rows across memory",
       {low({96, 150}), weight},
       [](const Tensors& t) { return at::linear(t[0].t(), t[1]); }},
      {"addmm", {x, low({96, 45}), bias}, [](const Tensors& t) { return at::addmm(t[2], t[0], t[1]); }},
      {"addmm of a transpose",
       {x, weight, bias},
       [](const Tensors& t) { return at::addmm(t[2], t[0], t[1].t()); }},
      {"mm", {x, low({96, 33})}, [](const Tensors& t) { return at::mm(t[0], t[1]); }},
      {"matmul of texts",
       {low({2, 5, 20, 96}), low({96, 64})},
       [](const Tensors& t) { return at::matmul(t[0], t[1]); }},
      {"part of a matrix",
       {low({150, 200}), weight},
       [](const Tensors& t) { return at::linear(t[0].narrow(1, 7, 96), t[1]); }},
  };
}

/// The output and the gradients of all inputs, from weights of the output that are low numbers.
Tensors results_of(const Way& way, at::ScalarType type, bool in_scope, bool of_magnitudes = false) {
  Tensors leaves;
  for (const at::Tensor& input : way.inputs)
    leaves.push_back((of_magnitudes ? input.abs() : input).to(type).detach().requires_grad_());
  at::Tensor output;
  {
    std::optional<AutocastScope> scope;
    if (in_scope) scope.emplace(at::kBFloat16);
    output = way.run(leaves);
  }
  at::manual_seed(9);
  at::Tensor weights = at::randn(output.sizes()).to(at::kBFloat16);
  if (of_magnitudes) weights = weights.abs();
  Tensors results = torch::autograd::grad({output}, leaves, {weights.to(output.scalar_type())});
  results.push_back(output.detach());
  return results;
}

// The bound of tests/kernels/product_test.cpp; no sum here has more than 200 terms. A bias's gradient is
// LibTorch's sum.
TEST_F(LowProduct, AndItsGradientsAreFp64sRoundedOnce) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.what);
    const Tensors here = results_of(way, at::kBFloat16, true), exact = results_of(way, at::kDouble, false),
                  magnitudes = results_of(way, at::kDouble, false, /*of_magnitudes=*/true);
    for (std::size_t i = 0; i < here.size(); ++i) {
      EXPECT_EQ(here[i].scalar_type(), at::kBFloat16);
      EXPECT_EQ(here[i].sizes(), exact[i].sizes());
      const at::Tensor bound = exact[i].abs() * 0x1p-8 + magnitudes[i] * (256 * 0x1p-24) + 1e-30;
      const at::Tensor off = (here[i].to(at::kDouble) - exact[i]).abs() / bound;
      EXPECT_LE(off.max().item<double>(), 1.0) << "result " << i;
    }
  }
}

TEST_F(LowProduct, TakesTheseAndLeavesOthersToLibTorch) {
  const AutocastScope scope(at::kBFloat16);
  const auto is_ours = [](const at::Tensor& output) {
    // Behind a view where the input has more than two dimensions.
    auto node = output.grad_fn();
    while (node->name().find("View") != std::string::npos) node = node->next_edge(0).function;
    return node->name().find("LowProduct") != std::string::npos;
  };
  for (const Way& way : ways()) {
    Tensors leaves;
    for (const at::Tensor& input : way.inputs)
      leaves.push_back(input.detach().to(at::kFloat).requires_grad_());
    EXPECT_TRUE(is_ours(way.run(leaves))) << way.what;
  }
  const at::Tensor x = at::randn({128, 128}).requires_grad_(), few = at::randn({100, 128}).requires_grad_();
  EXPECT_FALSE(is_ours(at::mm(few, x))) << "few rows";
  EXPECT_FALSE(is_ours(at::mm(x.to(at::kDouble), x.to(at::kDouble))));
  EXPECT_FALSE(is_ours(at::addmm(x, x, x))) << "a matrix added";
  EXPECT_FALSE(is_ours(at::addmm(x[0], x, x, 1, 2))) << "a factor";
  const AutocastScope fp16(at::kHalf);
  EXPECT_FALSE(is_ours(at::mm(x, x)));
  const AutocastScope in_fp32(at::kBFloat16, OpPolicy::standard(), {.products_in_fp32 = true});
  EXPECT_FALSE(is_ours(at::mm(x, x)));
  OpPolicy policy = OpPolicy::standard();
  policy.set("mm", OpRule::Promote);
  const AutocastScope promoted(at::kBFloat16, policy);
  EXPECT_FALSE(is_ours(at::mm(x.to(at::kBFloat16), x.to(at::kBFloat16))));
}

TEST_F(LowProduct, HasTheSameBitsWithAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const Way& way : ways()) {
    Tensors first;
    for (const int count : {1, 2, 4}) {
      at::set_num_threads(count);
      const Tensors results = results_of(way, at::kBFloat16, true);
      if (first.empty()) first = results;
      for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(results[i], first[i])) << way.what;
    }
  }
  at::set_num_threads(threads);
}

TEST_F(LowProduct, GradientsLieAsTheirWeights) {
  for (const Way& way : ways()) {
    const Tensors results = results_of(way, at::kBFloat16, true);
    EXPECT_EQ(results[1].strides(), way.inputs[1].strides()) << way.what;
  }
}

TEST_F(LowProduct, KeepsWhatLibTorchsKeeps) {
  constexpr std::size_t kNone = 9;
  for (const Way& way : ways()) {
    const auto kept = [&](bool ours, std::size_t without_grad) {
      std::optional<AtenOnCpu> stock;
      if (!ours) stock.emplace();
      Tensors leaves;
      for (const at::Tensor& input : way.inputs)
        leaves.push_back(input.to(at::kFloat).requires_grad_(leaves.size() != without_grad));
      const LiveBytes bytes;
      at::Tensor output;
      {
        const AutocastScope scope(at::kBFloat16);
        output = way.run(leaves);
      }
      return bytes.live();
    };
    for (const std::size_t without_grad : {kNone, std::size_t{0}, std::size_t{1}})
      EXPECT_LE(kept(true, without_grad), kept(false, without_grad)) << way.what << ", " << without_grad;
  }
}

TEST_F(LowProduct, OutputsMayBeWrittenTo) {
  const AutocastScope scope(at::kBFloat16);
  const at::Tensor x = at::randn({2, 70, 64}).requires_grad_(), weight = at::randn({64, 64}).requires_grad_();
  at::linear(x, weight).mul_(2).add_(1).view({-1}).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST_F(LowProduct, CanBeDifferentiatedTwice) {
  for (const Way& way : ways()) {
    const auto second = [&](at::ScalarType type) {
      Tensors leaves;
      for (const at::Tensor& input : way.inputs) leaves.push_back(input.to(type).detach().requires_grad_());
      std::optional<AutocastScope> scope;
      if (type == at::kBFloat16) scope.emplace(type);
      const at::Tensor loss = way.run(leaves).to(at::kDouble).square().sum() / 1000;
      const auto first = torch::autograd::grad({loss}, {leaves[0]}, {}, true, /*create_graph=*/true);
      return torch::autograd::grad({first[0].to(at::kDouble).square().sum() / 1000}, {leaves[1]})[0].to(
          at::kDouble);
    };
    const at::Tensor here = second(at::kBFloat16), exact = second(at::kDouble);
    // At most eight roundings lie on a way from a product to the result.
    EXPECT_LE((here - exact).norm().item<double>(), 8 * 0x1p-8 * exact.norm().item<double>()) << way.what;
  }
}

}  // namespace low_product_test
}  // namespace halfstep::testing
