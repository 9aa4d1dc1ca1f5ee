// Oracle throughout: the same function without a checkpoint, from the same seed, bit for bit.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <thread>

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
  EXPECT_NE(shape.find("checkpoint_activations: the function saved tensor 0 as Float [4] with strides [1]"),
            shape.npos)
      << shape;
  EXPECT_NE(shape.find("in forward and as Float [8]"), shape.npos) << shape;
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

// Both runs of a region must save the same tensors whatever scopes are open around or inside. The cases of
// one table: what the function opens, what is open around forward, and where backward runs.

constexpr int64_t kRows = 16;  // times kWidth is the fewest elements that CompressedActivations compresses

struct RegionWeights {
  explicit RegionWeights(at::ScalarType type) {
    at::manual_seed(21);
    const auto made = [&](std::vector<int64_t> sizes, double scale, double offset) {
      return (at::randn(sizes) * scale + offset).to(type).requires_grad_();
    };
    for (int i = 0; i < 3; ++i) weights.push_back(made({kWidth, kWidth}, 0.2, 0));
    for (int i = 0; i < 2; ++i) gains.push_back(made({kWidth}, 0.1, 1));
  }
  at::Tensor first_half(const at::Tensor& x) const {
    const at::Tensor normed = at::layer_norm(x, {kWidth}, gains[0]);
    return x + at::linear(at::gelu(at::linear(normed, weights[0])), weights[1]);
  }
  at::Tensor second_half(const at::Tensor& x) const {
    const at::Tensor normed = at::rms_norm(x, {kWidth}, gains[1], 1e-5);
    return at::linear(at::silu(normed), weights[2]) + at::linear(normed, weights[0]);
  }
  Tensors weights, gains;
};

/// How one run of the table is done.
struct Way {
  bool checkpoint = false, repeat = false, scopes = true;

  std::unique_ptr<AutocastScope> scope(at::ScalarType low, bool repeat_upcasts = true) const {
    if (!scopes) return nullptr;
    return std::make_unique<AutocastScope>(
        low, OpPolicy::standard(),
        AutocastOptions{.allow_emulated = true, .repeat_upcasts = repeat_upcasts, .repeat_outputs = repeat});
  }
  std::unique_ptr<CompressedActivations> compressed(Format format) const {
    return scopes ? std::make_unique<CompressedActivations>(format) : nullptr;
  }
  template <typename Function>
  at::Tensor call(Function function, const at::Tensor& x) const {
    return checkpoint ? checkpoint_activations(function, x) : function(x);
  }
};

using Region = std::function<at::Tensor(const RegionWeights&, const Way&, const at::Tensor&)>;

struct NamedRegion {
  const char* name;
  Region run;
};

at::Tensor both_halves(const RegionWeights& w, const at::Tensor& x) { return w.second_half(w.first_half(x)); }

const NamedRegion kRegions[] = {
    {"no scope", [](auto& w, auto&, auto& x) { return both_halves(w, x); }},
    {"BF16 scope",
     [](auto& w, auto& way, auto& x) {
       const auto scope = way.scope(at::kBFloat16);
       return both_halves(w, x);
     }},
    {"FP16 scope that keeps up-casts",
     [](auto& w, auto& way, auto& x) {
       const auto scope = way.scope(at::kHalf, false);
       return both_halves(w, x);
     }},
    {"scope around the first half",
     [](auto& w, auto& way, auto& x) {
       at::Tensor y;
       {
         const auto scope = way.scope(at::kBFloat16);
         y = w.first_half(x);
       }
       return w.second_half(y.to(x.scalar_type()));
     }},
    {"scope inside a scope",
     [](auto& w, auto& way, auto& x) {
       const auto outer = way.scope(at::kBFloat16);
       at::Tensor y = at::gelu(x);
       {
         const auto inner = way.scope(at::kHalf);
         y = w.first_half(y);
       }
       return w.second_half(y);
     }},
    {"E4M3 activations",
     [](auto& w, auto& way, auto& x) {
       const auto compressed = way.compressed(Format::E4M3);
       return both_halves(w, x);
     }},
    {"BF16 scope with BF16 activations",
     [](auto& w, auto& way, auto& x) {
       const auto scope = way.scope(at::kBFloat16);
       const auto compressed = way.compressed(Format::BF16);
       return both_halves(w, x);
     }},
    {"call inside the call",
     [](auto& w, auto& way, auto& x) {
       const auto inner = [w](const at::Tensor& x) { return w.second_half(x); };
       return way.call(inner, w.first_half(x));
     }},
    {"scope, and a call with a scope inside",
     [](auto& w, auto& way, auto& x) {
       const auto scope = way.scope(at::kBFloat16);
       const auto inner = [w, way](const at::Tensor& x) {
         const auto scope = way.scope(at::kHalf);
         return w.second_half(x);
       };
       return way.call(inner, at::gelu(w.first_half(x)));
     }},
};

enum class Around { Nothing, Bf16Scope, ScopeThatKeepsUpcasts, NormInScope, Compressed };
enum class Backward {
  Outside,
  Inside,
  InAnotherScope,
  InCompressed,
  OnAnotherThread,
  ForwardOnAnotherThread,
  WithGraph,
  Twice
};

Tensors table_gradients(const NamedRegion& region, Around around, Backward backward,
                        at::ScalarType weight_type, const Way& way) {
  const RegionWeights w(weight_type);
  const at::Tensor x = at::randn({kRows, kWidth}).to(weight_type).requires_grad_();
  const at::Tensor factors = at::randn({kRows, kWidth});
  Tensors leaves = w.weights;
  leaves.insert(leaves.end(), w.gains.begin(), w.gains.end());
  leaves.push_back(x);

  at::Tensor loss;
  Tensors gradients;
  const auto run_backward = [&] {
    const bool keep = backward == Backward::Twice, create = backward == Backward::WithGraph;
    if (keep) (void)torch::autograd::grad({loss}, leaves, {}, true, false, /*allow_unused=*/true);
    gradients = torch::autograd::grad({loss}, leaves, {}, create, create, /*allow_unused=*/true);
  };
  const auto run_forward = [&] {
    const auto scope = around == Around::Bf16Scope || around == Around::NormInScope ? way.scope(at::kBFloat16)
                       : around == Around::ScopeThatKeepsUpcasts ? way.scope(at::kBFloat16, false)
                                                                 : nullptr;
    // The input is a leaf, which is not compressed, and the loss saves no activation: the oracle needs none.
    const auto compressed =
        around == Around::Compressed && way.checkpoint ? way.compressed(Format::E4M3) : nullptr;
    const at::Tensor input = around == Around::NormInScope ? at::layer_norm(x, {kWidth}) : x;
    const auto function = [&region, w, way](const at::Tensor& x) { return region.run(w, way, x); };
    loss = (way.call(function, input).to(at::kFloat) * factors).sum();
    if (backward == Backward::Inside) run_backward();
  };
  const auto on_thread = [](const auto& body) { std::thread(body).join(); };
  backward == Backward::ForwardOnAnotherThread ? on_thread(run_forward) : run_forward();
  switch (backward) {
    case Backward::Inside:
      break;
    case Backward::InAnotherScope: {
      const auto scope = way.scope(at::kHalf);
      run_backward();
      break;
    }
    case Backward::InCompressed: {
      const CompressedActivations compressed(Format::E5M2);
      run_backward();
      break;
    }
    case Backward::OnAnotherThread:
      on_thread(run_backward);
      break;
    default:
      run_backward();
  }
  return gradients;
}

// Oracles: the same function without a checkpoint and with all outputs kept, bit for bit; and FP32 LibTorch.
TEST(CheckpointActivations, BothRunsSaveTheSameWhateverScopesAreOpen) {
  // Each thread of its own would start a team of threads: 60 seconds instead of 4.
  struct OneThread {
    const int before = at::get_num_threads();
    OneThread() { at::set_num_threads(1); }
    ~OneThread() { at::set_num_threads(before); }
  } const one_thread;
  int cases = 0;
  for (const auto weight_type : {at::kFloat, at::kBFloat16}) {
    for (const NamedRegion& region : kRegions) {
      for (int around = 0; around <= static_cast<int>(Around::Compressed); ++around) {
        const Tensors fp32 =
            table_gradients(region, Around(around), Backward::Outside, at::kFloat, {.scopes = false});
        for (int backward = 0; backward <= static_cast<int>(Backward::Twice); ++backward) {
          const auto gradients = [&](Way way) {
            return table_gradients(region, Around(around), Backward(backward), weight_type, way);
          };
          const std::string what = detail::concat(weight_type, " weights, ", region.name, ", around ", around,
                                                  ", backward ", backward);
          const Tensors expected = gradients({});
          for (std::size_t i = 0; i < expected.size(); ++i) {
            // Four saved tensors on the way to a gradient, each off by at most 2^-4 (E4M3); with a tensor in
            // the place of another the error would be about 1.
            EXPECT_LT((expected[i].to(at::kFloat) - fp32[i]).norm().item<double>(),
                      4 * 0x1p-4 * fp32[i].norm().item<double>())
                << what << ", gradient " << i;
          }
          for (const bool repeat : {false, true}) {
            Tensors found;
            ASSERT_NO_THROW(found = gradients({.checkpoint = true, .repeat = repeat})) << what;
            for (std::size_t i = 0; i < expected.size(); ++i)
              EXPECT_TRUE(at::equal(found[i], expected[i]))
                  << what << ", repeat " << repeat << ", gradient " << i;
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 2 * 9 * 5 * 8 * 2);
}

TEST(CheckpointActivations, AfterAnExceptionInsideScopesTheNextCallHasTheRightBits) {
  const RegionWeights w(at::kFloat);
  const at::Tensor x = at::randn({kRows, kWidth}).requires_grad_();
  const auto throwing = std::make_shared<bool>(false);
  const auto function = [w, throwing](const at::Tensor& x) {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    const CompressedActivations compressed(Format::BF16);
    const at::Tensor y = at::dropout(w.first_half(x), 0.5, true);
    if (*throwing) throw std::runtime_error("the function's own");
    return w.second_half(y);
  };
  const auto gradients = [&](bool checkpoint) {
    at::manual_seed(5);
    const at::Tensor y = checkpoint ? checkpoint_activations(function, x) : function(x);
    return std::pair(y.to(at::kFloat).sum(), w.weights);
  };
  const auto plain = [&] {
    at::manual_seed(5);
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(),
                              {.allow_emulated = true, .repeat_outputs = false});
    const CompressedActivations compressed(Format::BF16);
    return torch::autograd::grad(
        {w.second_half(at::dropout(w.first_half(x), 0.5, true)).to(at::kFloat).sum()}, w.weights);
  };
  *throwing = true;
  EXPECT_THROW(gradients(true), std::runtime_error);
  *throwing = false;
  const auto [loss, leaves] = gradients(true);
  *throwing = true;
  EXPECT_THROW((void)torch::autograd::grad({loss}, leaves, {}, true), std::runtime_error);
  *throwing = false;
  expect_equal(torch::autograd::grad({loss}, leaves), plain());
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(CheckpointActivations, WhatAFailedSecondRunMadeIsNotUsedByTheNext) {
  const auto factor = std::make_shared<float>(1);
  const auto extra = std::make_shared<bool>(false);
  const at::Tensor x = at::ones(4).requires_grad_();
  const at::Tensor y = checkpoint_activations(
      [=](const at::Tensor& x) {
        const at::Tensor y = (x * *factor).exp();
        return *extra ? y.sin() : y;
      },
      x);
  *factor = 3, *extra = true;
  EXPECT_NE(error_of([&] { torch::autograd::backward({y.sum()}, {}, true); }), "no error");
  *factor = 1, *extra = false;
  y.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.exp()));
}

TEST(CheckpointActivations, TensorsOfOneShapeFromOtherOperationsAreAnError) {
  const auto calls = std::make_shared<int>(0);
  const at::Tensor x = at::ones({3, 3}).requires_grad_();
  const auto error_with = [&](auto first, auto second) {
    *calls = 0;
    const at::Tensor y = checkpoint_activations(
        [=](const at::Tensor& x) { return (*calls)++ == 0 ? first(x) : second(x); }, x);
    return error_of([&] { y.sum().backward(); });
  };
  const std::string other =
      error_with([](auto& x) { return (x * 2).exp(); }, [](auto& x) { return (x * 2).tanh(); });
  EXPECT_NE(other.find("ExpBackward0"), other.npos) << other;
  EXPECT_NE(other.find("TanhBackward0"), other.npos) << other;
  const std::string layout =
      error_with([](auto& x) { return (x * 2).sin(); }, [](auto& x) { return (x * 2).t().sin().t(); });
  EXPECT_NE(layout.find("strides [1, 3]"), layout.npos) << layout;
}

TEST(CheckpointActivations, BackwardInsideTheFunctionIsAnError) {
  const at::Tensor x = at::ones(4).requires_grad_();
  const auto penalty = [](const at::Tensor& x) {
    return torch::autograd::grad({x.exp().sum()}, {x}, {}, true, /*create_graph=*/true)[0].sum();
  };
  const std::string error = error_of([&] { (void)checkpoint_activations(penalty, x); });
  EXPECT_NE(error.find("the function itself calls backward"), error.npos) << error;
}

// What the second run reads must be what the first read, also where no node saves it: a bias, an embedding,
// the weight of a layer whose input has no gradient, a frozen weight.
TEST(CheckpointActivations, AWeightChangedInPlaceBeforeBackwardIsAnError) {
  const at::Tensor x = at::randn({4, 6}), weight = at::randn({6, 6}).requires_grad_(),
                   bias = at::randn({6}).requires_grad_(), frozen = at::randn({6, 6}),
                   rows = at::randn({9, 6}).requires_grad_();
  const at::Tensor ids = at::arange(4);
  const auto function = [=](const at::Tensor& x) {
    const at::Tensor embedded = at::embedding(rows, ids);
    return at::linear(at::tanh(at::linear(x, weight, bias) + embedded), frozen).exp();
  };
  const auto error_after = [&](const at::Tensor& changed) {
    const at::Tensor y = checkpoint_activations(function, x).sum();
    if (changed.defined()) {
      const at::NoGradGuard no_grad;
      changed.mul_(1.5);
    }
    return error_of([&] { (void)torch::autograd::grad({y}, {weight, bias, rows}); });
  };
  EXPECT_EQ(error_after({}), "no error");
  for (const auto& [changed, sizes] :
       {std::pair(weight, "[6, 6]"), {bias, "[6]"}, {rows, "[9, 6]"}, {frozen, "[6, 6]"}}) {
    const std::string error = error_after(changed);
    EXPECT_NE(error.find("changed in place between forward and backward"), error.npos) << sizes << error;
    EXPECT_NE(error.find(sizes), error.npos) << error;
  }
}

TEST(CheckpointActivations, AnOutputMayBeChangedInPlace) {
  const at::Tensor x = at::ones(4).requires_grad_();
  at::Tensor y = checkpoint_activations([](const at::Tensor& x) { return x.exp(); }, x);
  y.mul_(2);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), x.exp() * 2));
}

TEST(CheckpointActivations, RecurrentLayersWithDropoutHaveTheBitsOfAPlainRun) {
  const auto gradients = [](auto layer, bool checkpoint) {
    at::manual_seed(7);
    const at::Tensor x = at::randn({5, 3, 8}).requires_grad_();
    auto function = [layer](const at::Tensor& x) mutable { return std::get<0>(layer->forward(x)); };
    const at::Tensor y = checkpoint ? checkpoint_activations(function, x) : function(x);
    Tensors leaves = layer->parameters();
    leaves.push_back(x);
    return torch::autograd::grad({y.pow(2).sum()}, leaves);
  };
  const torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 8).num_layers(2).dropout(0.5));
  const torch::nn::GRU gru(torch::nn::GRUOptions(8, 8).num_layers(2).dropout(0.5).bidirectional(true));
  for (const bool low : {false, true}) {
    std::optional<AutocastScope> scope;
    if (low) scope.emplace(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    expect_equal(gradients(lstm, true), gradients(lstm, false));
    expect_equal(gradients(gru, true), gradients(gru, false));
  }
}

// Its gradients do not depend on the running statistics, which both runs update.
TEST(CheckpointActivations, BatchNormHasTheGradientsOfAPlainRun) {
  const auto gradients = [](bool checkpoint) {
    at::manual_seed(7);
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 8, 3));
    torch::nn::BatchNorm2d norm(8);
    const at::Tensor x = at::randn({4, 3, 8, 8}).requires_grad_();
    auto function = [conv, norm](const at::Tensor& x) mutable { return at::silu(norm(conv(x))); };
    const at::Tensor y = checkpoint ? checkpoint_activations(function, x) : function(x);
    return torch::autograd::grad({y.pow(2).sum()}, {x, conv->weight, norm->weight, norm->bias});
  };
  for (const bool low : {false, true}) {
    std::optional<AutocastScope> scope;
    if (low) scope.emplace(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    expect_equal(gradients(true), gradients(false));
  }
}

TEST(CheckpointActivations, ATensorThatIsSavedAndThenChangedInPlaceIsRefused) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions = {
      [](const at::Tensor& x) { return at::sigmoid(x).mul_(3); },
      [](const at::Tensor& x) { return at::relu(x).add_(1); },
      [](const at::Tensor& x) { return at::tanh(x).add_(1); },
      [](const at::Tensor& x) {
        at::Tensor y = x * 2;
        const at::Tensor square = y * y;
        y.zero_();
        return square;
      }};
  for (const auto& function : functions) {
    const at::Tensor x = at::randn({64}).requires_grad_();
    const at::Tensor plain = function(x).sum(), checkpointed = checkpoint_activations(function, x).sum();
    EXPECT_THROW(plain.backward(), c10::Error);  // as without the checkpoint
    EXPECT_THROW(checkpointed.backward(), Error);
  }
  // Changed before it is saved, which is fine.
  const auto fine = [](const at::Tensor& x) {
    const at::Tensor y = at::sigmoid((x * 2).add_(1));
    return y * y;
  };
  const at::Tensor x = at::randn({64}).requires_grad_();
  const at::Tensor wanted = torch::autograd::grad({fine(x).sum()}, {x})[0];
  const at::Tensor found = torch::autograd::grad({checkpoint_activations(fine, x).sum()}, {x})[0];
  EXPECT_TRUE(at::equal(wanted, found));
}

TEST(CheckpointActivations, AnEmbeddingThatScalesItsRowsRunsTwice) {
  const auto gradient = [](bool checkpoint, int backwards) {
    at::manual_seed(8);
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(9, 6).max_norm(1.0));
    const at::Tensor ids = at::arange(4);
    auto function = [embedding](const at::Tensor& ids) mutable { return embedding(ids).tanh().exp(); };
    const at::Tensor y = checkpoint ? checkpoint_activations(function, ids) : function(ids);
    at::Tensor gradient;
    for (int i = 0; i < backwards; ++i)
      gradient = torch::autograd::grad({y.sum()}, {embedding->weight}, {}, i + 1 < backwards)[0];
    return gradient;
  };
  for (const int backwards : {1, 2}) {
    // A row that was scaled to norm 1 may be scaled again by 1 / (1 + 1e-7) and rounding: one part in 2^22.
    EXPECT_TRUE(at::allclose(gradient(true, backwards), gradient(false, 1), 0x1p-20, 0x1p-20));
  }
}

}  // namespace
}  // namespace halfstep::testing
