// Oracle throughout: the same function without a checkpoint, from the same seed, bit for bit.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/error_of.h"
#include "support/live_bytes.h"
#include "support/small_models.h"

namespace halfstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kWidth = 32;

/// A block with dropout: attention, norms, products.
struct DropoutBlock : torch::nn::Module {
  DropoutBlock() {
    inner = register_module("inner", std::make_shared<TransformerBlock>(kWidth, /*heads=*/2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::dropout(inner->forward(at::dropout(x, 0.2, true)), 0.3, true);
  }
  std::shared_ptr<TransformerBlock> inner;
};

using Block = std::shared_ptr<DropoutBlock>;
using RunBlock = std::function<at::Tensor(const Block&, const at::Tensor&)>;

const RunBlock plain = [](const Block& block, const at::Tensor& x) { return block->forward(x); };
const RunBlock checkpointed = [](const Block& block, const at::Tensor& x) {
  return checkpoint_activations([block](const at::Tensor& x) { return block->forward(x); }, x);
};

struct Model {
  Model() {
    at::manual_seed(2);
    for (auto& block : blocks) block = std::make_shared<DropoutBlock>();
    x = at::randn({2, 8, kWidth});
  }
  Tensors parameters() const {
    Tensors all;
    for (const auto& block : blocks) {
      for (const at::Tensor& parameter : block->parameters()) all.push_back(parameter);
    }
    return all;
  }
  at::Tensor loss(const RunBlock& run, const at::Tensor& input) const {
    at::manual_seed(9);
    at::Tensor y = input;
    for (const auto& block : blocks) y = run(block, y);
    return y.pow(2).mean();
  }
  std::array<Block, 3> blocks;
  at::Tensor x;
};

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

/// The loss, the gradients, and the next random number of the program.
template <typename OpenRegion>
Tensors train(const RunBlock& run, OpenRegion open_region, bool input_has_gradient = true) {
  const Model model;
  const at::Tensor input = model.x.clone().requires_grad_(input_has_gradient);
  at::Tensor loss;
  {
    [[maybe_unused]] const auto region = open_region();
    loss = model.loss(run, input);
  }
  const at::Tensor between = at::rand(1);  // moves the generator on between forward and backward
  loss.backward();
  Tensors all{loss.detach(), between, at::rand(4)};
  if (input_has_gradient) all.push_back(input.grad());
  for (const at::Tensor& parameter : model.parameters()) all.push_back(parameter.grad());
  return all;
}

const auto no_region = [] { return 0; };
template <at::ScalarType Low>
AutocastScope scope() {
  return AutocastScope(Low, OpPolicy::standard(), kAnyMachine);
}

TEST(CheckpointActivations, GradientsWithDropoutHaveTheBitsOfAPlainRun) {
  expect_equal(train(checkpointed, no_region), train(plain, no_region));
}

TEST(CheckpointActivations, TheSecondRunHasTheTypeAndThePolicyOfTheFirst) {
  expect_equal(train(checkpointed, scope<at::kBFloat16>), train(plain, scope<at::kBFloat16>));
  expect_equal(train(checkpointed, scope<at::kHalf>), train(plain, scope<at::kHalf>));
  auto policy = OpPolicy::standard();
  policy.set("layer_norm", OpRule::Low).set("linear", OpRule::Fp32);
  const auto changed = [&] { return AutocastScope(at::kBFloat16, policy, kAnyMachine); };
  expect_equal(train(checkpointed, changed), train(plain, changed));
}

TEST(CheckpointActivations, InputsWithoutAGradientAreFine) {
  expect_equal(train(checkpointed, no_region, false), train(plain, no_region, false));
}

TEST(CheckpointActivations, BackwardInsideAScopeDoesNotChangeTheSecondRun) {
  const auto gradients = [](const RunBlock& run) {
    const Model model;
    const at::Tensor loss = model.loss(run, model.x);
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    return torch::autograd::grad({loss}, model.parameters());
  };
  expect_equal(gradients(checkpointed), gradients(plain));
}

TEST(CheckpointActivations, CallsInsideCallsAndAPartUsedTwice) {
  const RunBlock nested = [](const Block& block, const at::Tensor& x) {
    return checkpoint_activations(
        [block](const at::Tensor& x) {
          const at::Tensor y = checkpointed(block, at::gelu(x)).tanh();
          return checkpointed(block, y) + y;
        },
        x);
  };
  const RunBlock unfolded = [](const Block& block, const at::Tensor& x) {
    const at::Tensor y = plain(block, at::gelu(x)).tanh();
    return plain(block, y) + y;
  };
  expect_equal(train(nested, no_region), train(unfolded, no_region));
  expect_equal(train(nested, scope<at::kBFloat16>), train(unfolded, scope<at::kBFloat16>));
}

TEST(CheckpointActivations, AKeptGraphRunsAgainEachTime) {
  const Model model;
  const at::Tensor loss = model.loss(checkpointed, model.x);
  const Tensors expected = torch::autograd::grad({model.loss(plain, model.x)}, model.parameters());
  for (int pass = 0; pass < 2; ++pass)
    expect_equal(torch::autograd::grad({loss}, model.parameters(), {}, /*retain_graph=*/true), expected);
  expect_equal(torch::autograd::grad({loss}, model.parameters()), expected);
}

TEST(CheckpointActivations, SecondDerivativesAreThoseOfAPlainRun) {
  const auto second = [](bool checkpoint) {
    at::manual_seed(4);
    const at::Tensor weight = at::randn({6, 6}).requires_grad_(), x = at::randn({3, 6}).requires_grad_();
    const auto function = [weight](const at::Tensor& x) {
      return at::softmax(at::tanh(x.mm(weight)), 1).pow(3);
    };
    const at::Tensor y = checkpoint ? checkpoint_activations(function, x) : function(x);
    const Tensors first = torch::autograd::grad({y.sum()}, {weight, x}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].sin().sum()}, {weight, x});
  };
  expect_equal(second(true), second(false));
}

TEST(CheckpointActivations, SeveralInputsAndSeveralOutputs) {
  const auto gradients = [](bool checkpoint) {
    at::manual_seed(4);
    const at::Tensor a = at::randn({3, 4}).requires_grad_(), b = at::randn({3, 4}).requires_grad_();
    const auto function = [](const at::Tensor& a, const at::Tensor& b) {
      return std::pair(a * b.exp(), std::vector{a.sin(), (a * b).cos()});
    };
    const auto [first, others] = checkpoint ? checkpoint_activations(function, a, b) : function(a, b);
    return torch::autograd::grad({first.sum() + (others[0] * others[1]).sum()}, {a, b});
  };
  expect_equal(gradients(true), gradients(false));
}

TEST(CheckpointActivations, OnlyTheInputsAreAliveBeforeBackward) {
  const Model model;
  const int64_t input_bytes = model.x.numel() * 4;
  const auto alive = [&](const RunBlock& run) {
    const LiveBytes bytes;
    const at::Tensor loss = model.loss(run, model.x);
    return bytes.live();
  };
  // Two inputs between blocks, the last block's output for pow and its square, the loss: and 5 KB of
  // generator state a call.
  EXPECT_LT(alive(checkpointed), 4 * input_bytes + 3 * 5056 + 64);
  EXPECT_GT(alive(plain), 20 * input_bytes);
  // A call around all three leaves its own input, which is the caller's, and the output.
  const LiveBytes bytes;
  const at::Tensor y = checkpoint_activations(
      [&model](const at::Tensor& x) {
        at::Tensor y = x;
        for (const auto& block : model.blocks) y = checkpointed(block, y);
        return y;
      },
      model.x);
  EXPECT_LT(bytes.live(), 1 * input_bytes + 4 * 5056 + 64);
}

TEST(CheckpointActivations, WhatWasMadeAgainIsFreedByBackward) {
  const Model model;
  const LiveBytes bytes;
  at::Tensor loss = model.loss(checkpointed, model.x);
  const Tensors grads = torch::autograd::grad({loss}, model.parameters());
  int64_t grad_bytes = 0;
  for (const at::Tensor& grad : grads) grad_bytes += static_cast<int64_t>(grad.nbytes());
  EXPECT_LE(bytes.live(), grad_bytes + 64);
}

TEST(CheckpointActivations, WithoutGradientsItIsAPlainCall) {
  const Model model;
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model.loss(checkpointed, model.x), model.loss(plain, model.x)));
}

TEST(CheckpointActivations, AnExceptionPassesAndLeavesNothingBehind) {
  const at::Tensor x = at::ones(4).requires_grad_();
  const auto throwing = [](bool* now) {
    return [now](const at::Tensor& x) {
      const at::Tensor y = x.exp().sin();
      if (*now) throw std::runtime_error("the function's own");
      return y;
    };
  };
  bool now = true;
  EXPECT_THROW(checkpoint_activations(throwing(&now), x), std::runtime_error);
  now = false;
  const at::Tensor y = checkpoint_activations(throwing(&now), x).sum();
  now = true;
  at::manual_seed(6);
  EXPECT_THROW(torch::autograd::backward({y}, {}, /*retain_graph=*/true), std::runtime_error);
  const at::Tensor random = at::rand(3);
  at::manual_seed(6);
  EXPECT_TRUE(at::equal(random, at::rand(3)));
  now = false;
  y.backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.exp().cos() * x.exp()));
}

TEST(CheckpointActivations, ASecondRunThatDiffersIsAnErrorByName) {
  const at::Tensor x = at::ones(4).requires_grad_();
  const auto error_with = [&](auto first, auto second) {
    auto calls = std::make_shared<int>(0);
    const at::Tensor y = checkpoint_activations(
        [=](const at::Tensor& x) { return (*calls)++ == 0 ? first(x) : second(x); }, x);
    return error_of([&] { y.sum().backward(); });
  };
  const auto once = [](const at::Tensor& x) { return (x * 2).exp(); };
  const auto wider = [](const at::Tensor& x) { return (x * 2).repeat(2).exp(); };
  const auto twice = [](const at::Tensor& x) { return (x * 2).exp().exp(); };
  const auto never = [](const at::Tensor& x) { return x * 2; };
  const std::string shape = error_with(once, wider), more = error_with(once, twice),
                    fewer = error_with(once, never);
  EXPECT_NE(
      shape.find("checkpoint_activations: the function saved tensor 0 as Float [4] on cpu in forward and as "
                 "Float [8]"),
      shape.npos)
      << shape;
  EXPECT_NE(more.find("saved 1 tensors in forward and more"), more.npos) << more;
  EXPECT_NE(fewer.find("saved 1 tensors in forward and 0 when it was run again"), fewer.npos) << fewer;
}

TEST(CheckpointActivations, AnInputThatWasChangedInPlaceIsAnError) {
  const at::Tensor weight = at::ones(4).requires_grad_(), x = at::ones(4);
  const at::Tensor y =
      checkpoint_activations([weight](const at::Tensor& x) { return (weight * x).exp(); }, x);
  x.add_(1);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

}  // namespace
}  // namespace halfstep::testing
