// Models that know nothing of recipes, trained in one: which products are quantised, what histories take in,
// and that a resumed run is the uninterrupted one.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "quant/quantised.h"
#include "support/any_machine.h"
#include "support/error_of.h"

namespace halfstep::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Mlp : torch::nn::Module {
  explicit Mlp(std::int64_t width = 32)
      : first(register_module("first", torch::nn::Linear(16, width))),
        middle(register_module("middle", torch::nn::Linear(width, width))),
        other(
            register_module("other", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)))),
        last(register_module("last", torch::nn::Linear(width, 16))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(at::gelu(other(at::gelu(middle(at::gelu(first(x)))))));
  }
  torch::nn::Linear first, middle, other, last;
};

std::shared_ptr<Mlp> make_mlp() {
  at::manual_seed(11);
  return std::make_shared<Mlp>();
}

std::vector<Precision> all_precisions() {
  return {Precision::fp8_delayed(), Precision::fp8_current(), Precision::fp8_rowwise(),
          Precision::fp8_block(),   Precision::mxfp8(),       Precision::nvfp4()};
}

MixedPrecision take_in(const Precision& precision, torch::nn::Module& model,
                       Accumulation sum = Accumulation::None) {
  return MixedPrecision(precision, model, {.autocast = kAnyMachine, .accumulation = sum});
}

/// The history of one tensor, without the present step's.
std::vector<float> history(const MixedPrecision& mp, const std::string& role, const std::string& weight) {
  const at::Tensor saved = mp.state_dict().tensor("recipe.amax." + role + "." + weight);
  return {saved.const_data_ptr<float>(), saved.const_data_ptr<float>() + saved.numel() - 1};
}

at::Tensor batch(int step) {
  at::manual_seed(100 + step);
  return at::randn({24, 16});
}

struct Loop {
  explicit Loop(const Precision& precision, Accumulation sum = Accumulation::None)
      : model(make_mlp()), mp(take_in(precision, *model, sum)), optimizer(mp.params(), {.lr = 1e-2}) {}

  bool step(const at::Tensor& x) {
    const at::Tensor loss = mp.forward([&] { return model->forward(x).to(at::kFloat).square().mean(); });
    mp.backward(loss);
    return finish();
  }
  bool finish() {
    mp.close_sum();
    const GradSummary grads = mp.inspect_grads();
    const bool stepped = optimizer.step(grads.clipped_to(1.0)).stepped();
    mp.advance(grads);
    optimizer.zero_grad();
    return stepped;
  }

  std::shared_ptr<Mlp> model;
  MixedPrecision mp;
  AdamW optimizer;
};

std::string node_of(const at::Tensor& output) { return output.grad_fn()->name(); }

TEST(RecipePlan, KeepsEmbeddingsFirstAndLastAndOddSizesAndSaysWhy) {
  const auto plan = Precision::mxfp8().plan_layers({{"wte.weight", 100, 32, true},
                                                    {"a.weight", 32, 32},
                                                    {"b.weight", 64, 32},
                                                    {"c.weight", 50, 32},
                                                    {"rnn.weight_ih_l0", 64, 32},
                                                    {"d.weight", 32, 32}});
  std::vector<std::string> reasons;
  for (const LayerPlan& layer : plan) reasons.push_back(layer.reason);
  EXPECT_EQ(reasons, (std::vector<std::string>{"an embedding", "the first linear layer", "follows the recipe",
                                               "50 is not divisible by 16", "the weight of a recurrent layer",
                                               "the last linear layer"}));
  EXPECT_EQ(std::count_if(plan.begin(), plan.end(), [](const LayerPlan& layer) { return layer.quantised; }),
            1);
}

TEST(RecipePlan, TheFirstRuleThatMatchesCounts) {
  auto precision = Precision::fp8_current();
  precision.quantise("a.weight").keep_high("*").quantise("b.weight");
  const auto plan = precision.plan_layers({{"a.weight", 32, 32}, {"b.weight", 32, 32}});
  EXPECT_TRUE(plan[0].quantised);
  EXPECT_FALSE(plan[1].quantised);
  EXPECT_EQ(plan[1].reason, "the rule '*'");
}

TEST(RecipePlan, ARuleCountsMoreThanAName) {
  auto precision = Precision::mxfp8();
  precision.quantise("patch_embed.weight");
  const auto plan =
      precision.plan_layers({{.name = "patch_embed.weight", .rows = 32, .columns = 32, .is_embedding = true},
                             {.name = "tok_embed.weight", .rows = 32, .columns = 32, .is_embedding = true}});
  EXPECT_TRUE(plan[0].quantised);
  EXPECT_FALSE(plan[1].quantised);
  EXPECT_EQ(plan[1].reason, "an embedding");
}

TEST(RecipePlan, ThatCoversNothingIsRefused) {
  const auto model = make_mlp();
  auto precision = Precision::mxfp8();
  precision.keep_high("*");
  EXPECT_THROW(take_in(precision, *model), Error);
  EXPECT_EQ(model->middle->weight.scalar_type(), at::kFloat);
  auto mp = take_in(Precision::mxfp8(), *model);
  EXPECT_EQ(mp.quantised_uses("first.weight"), 0);
  EXPECT_THROW(mp.quantised_uses("frist.weight"), Error);
  // Patterns with many stars are not slow.
  precision.layer_rules = {{std::string(40, '*') + "x", false}, {"*i*d*e*", true}};
  EXPECT_TRUE(
      precision.plan_layers({{.name = std::string(200, 'a') + "middle", .rows = 32, .columns = 32}})[0]
          .quantised);
}

TEST(RecipePlan, ARuleThatFitsNoWeightIsRefused) {
  auto precision = Precision::fp8_current();
  precision.keep_high("nobody.*");
  const auto model = make_mlp();
  EXPECT_THROW(take_in(precision, *model), Error);
  EXPECT_EQ(model->middle->weight.scalar_type(), at::kFloat) << "a model that is refused is left as it was";
}

TEST(Recipes, OnlyTheWeightsOfThePlanAreQuantisedAndOnlyInsideTheScope) {
  const auto model = make_mlp(), outside = make_mlp();
  auto mp = take_in(Precision::mxfp8(), *model);
  const at::Tensor x = at::randn({4, 32}).requires_grad_();
  const auto by = [&](auto&& linear) { return node_of(mp.forward([&] { return linear(x); })); };
  EXPECT_NE(by(model->middle).find("QuantisedLinear"), std::string::npos);
  EXPECT_NE(by(model->other).find("QuantisedLinear"), std::string::npos);
  EXPECT_EQ(by(model->last).find("QuantisedLinear"), std::string::npos);
  EXPECT_EQ(by(outside->middle).find("QuantisedLinear"), std::string::npos) << "another model's";
  EXPECT_EQ(node_of(model->middle(x.to(at::kBFloat16))).find("QuantisedLinear"), std::string::npos);

  EXPECT_EQ(mp.quantised_uses("middle.weight"), 1);
  EXPECT_EQ(mp.quantised_uses("last.weight"), 0);
}

TEST(Recipes, AScopeInsideTheForwardKeepsTheRecipeAndADisabledOneEndsIt) {
  Loop loop(Precision::fp8_current());
  loop.mp.forward([&] {
    const at::Tensor x = at::gelu(loop.model->first(batch(0)));
    const AutocastScope inner(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    EXPECT_NE(node_of(loop.model->other(x)).find("Quantised"), std::string::npos);
    const auto off = AutocastScope::disabled();
    EXPECT_EQ(node_of(loop.model->other(x)).find("Quantised"), std::string::npos);
    return x;
  });
  EXPECT_EQ(loop.mp.quantised_uses("other.weight"), 1);
}

TEST(Recipes, LinearAddmmAndMmOfAWeightOrItsTransposeAreOneProduct) {
  at::manual_seed(1);
  const at::Tensor weight = at::randn({48, 32}), bias = at::randn({48}), x = at::randn({20, 32});
  for (const Precision& precision : all_precisions()) {
    const auto outputs = [&](bool transposed) {
      const at::Tensor w = (transposed ? weight.t().contiguous() : weight.clone()).requires_grad_();
      auto chosen = precision;
      chosen.quantise("w");
      MixedPrecision mp(chosen, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
      std::vector<at::Tensor> found;
      const auto add = [&](auto function) {
        w.mutable_grad() = at::Tensor();
        const at::Tensor y = mp.forward(function);
        EXPECT_NE(node_of(y).find("QuantisedLinear"), std::string::npos);
        y.to(at::kFloat).square().sum().backward();
        found.push_back(y.detach());
        found.push_back(transposed ? w.grad().t() : w.grad());
      };
      const at::Tensor in_by_out = transposed ? w : w.t();
      add([&] { return at::addmm(bias, x, in_by_out); });
      add([&] { return at::linear(x, transposed ? w.t() : w, bias); });
      add([&] { return at::mm(x, in_by_out); });
      return found;
    };
    const auto as_linear = outputs(false), as_gpt2 = outputs(true);
    EXPECT_TRUE(at::equal(as_linear[0], as_linear[2])) << precision.name();
    // Stochastic rounding takes new bits at each call.
    const bool repeats = !precision.recipe->weight_grad.left.stochastic;
    if (repeats) {
      EXPECT_TRUE(at::equal(as_linear[1], as_linear[3])) << precision.name();
    }
    for (std::size_t i = 0; i < as_linear.size(); ++i) {
      // A weight of the other layout has its blocks elsewhere only where they are not square, and its sums in
      // another order: one unit of BF16.
      const double scale = as_linear[i].abs().max().item<double>();
      const bool is_grad = i % 2;
      if (is_grad && !repeats) continue;
      EXPECT_LE((as_linear[i].to(at::kFloat) - as_gpt2[i].to(at::kFloat)).abs().max().item<double>(),
                scale * 0x1p-7)
          << precision.name() << " " << i;
    }
  }
}

/// y, dx and dw of a linear layer in FP64, from operands that the recipe has quantised.
TEST(Recipes, ForwardAndBackwardAreTheProductsOfTheRecipe) {
  at::manual_seed(3);
  const at::Tensor weight = at::randn({48, 64}) * 0.1, x0 = at::randn({40, 64}),
                   g = at::randn({40, 48}) * 1e-3;
  for (Precision precision : all_precisions()) {
    const Recipe& recipe = *precision.recipe;
    if (recipe.weight_grad.left.stochastic) continue;  // tests/quant/quantised_test.cpp has its mean
    precision.quantise("w");
    const at::Tensor w = weight.clone().requires_grad_();
    MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
    const at::Tensor x = x0.to(at::kBFloat16).requires_grad_();
    const at::Tensor y = mp.forward([&] { return at::linear(x, w); });
    const at::Tensor dy = g.to(at::kBFloat16);
    y.backward(dy);
    QuantiseCounts counts;
    const auto values = [&](const at::Tensor& matrix, const OperandRule& rule, bool over_rows) {
      return decoded(quantised(matrix.detach(), {.rule = rule, .sums_over_rows = over_rows}, counts))
          .to(at::kDouble);
    };
    const auto expect_near = [&](const at::Tensor& found, const at::Tensor& a, const at::Tensor& b,
                                 const char* what) {
      const at::Tensor expected = a.mm(b);
      // FP32 sums, a decoded scale that was rounded once per operand, the output rounded to BF16.
      const at::Tensor bound = a.abs().mm(b.abs()) * ((static_cast<double>(a.size(1)) + 5) * 0x1p-24) +
                               expected.abs() * (0x1p-8 * (1 + 0x1p-8));
      EXPECT_LE(((found.to(at::kDouble) - expected).abs() / (bound + 1e-30)).max().item<double>(), 1)
          << recipe.name << " " << what;
    };
    expect_near(y.detach(), values(x, recipe.forward.left, false), values(w, recipe.forward.right, false).t(),
                "y");
    expect_near(x.grad(), values(dy, recipe.input_grad.left, false), values(w, recipe.input_grad.right, true),
                "dx");
    expect_near(w.grad(), values(dy, recipe.weight_grad.left, true).t(),
                values(x, recipe.weight_grad.right, true), "dw");
  }
}

TEST(Recipes, AWeightGradientMayStayInHighPrecision) {
  at::manual_seed(3);
  auto precision = Precision::fp8_rowwise();
  precision.recipe->weight_grad.quantised = false;
  precision.quantise("w");
  const at::Tensor w = at::randn({48, 64}).requires_grad_();
  MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
  const at::Tensor x = at::randn({40, 64}).to(at::kBFloat16), dy = at::randn({40, 48}).to(at::kBFloat16);
  mp.forward([&] { return at::linear(x, w); }).backward(dy);
  EXPECT_TRUE(at::equal(w.grad(), at::mm(dy.t(), x)));
}

/// Bytes that are alive because of what this thread did since it was constructed.
struct LiveBytes : c10::MemoryReportingInfoBase {
  std::int64_t live = 0;
  void reportMemoryUsage(void*, std::int64_t bytes, size_t, size_t, c10::Device) override { live += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
};

TEST(Recipes, KeepAtMost55PercentOfTheBytesOfABf16LinearForBackward) {
  const at::Tensor x = at::randn({512, 256}).to(at::kBFloat16);
  for (const Precision& precision : all_precisions()) {
    auto chosen = precision;
    chosen.quantise("w");
    const at::Tensor w = at::randn({256, 256}).requires_grad_();
    MixedPrecision mp(chosen, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
    const auto report = std::make_shared<LiveBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, report);
    const at::Tensor y = mp.forward([&] { return at::linear(x, w); });
    // A BF16 linear keeps x, which is nobody else's where it was computed.
    const double kept = static_cast<double>(report->live) - static_cast<double>(y.nbytes());
    EXPECT_GT(kept, 0.49 * static_cast<double>(x.nbytes())) << precision.name();
    EXPECT_LE(kept, 0.55 * static_cast<double>(x.nbytes())) << precision.name();
  }
}

TEST(Histories, TakeTheLargestOfEachCleanStepAndNothingElse) {
  Loop loop(Precision::fp8_delayed());
  EXPECT_TRUE(history(loop.mp, "input", "middle.weight").empty());
  const float before = loop.model->other->weight.detach().abs().max().item<float>();
  EXPECT_TRUE(loop.step(batch(0)));
  ASSERT_EQ(history(loop.mp, "weight", "other.weight"), (std::vector<float>{before}));
  EXPECT_EQ(history(loop.mp, "input", "middle.weight").size(), 1u);
  EXPECT_EQ(history(loop.mp, "grad", "middle.weight").size(), 1u);
  {  // An evaluation leaves no trace.
    const torch::NoGradGuard no_grad;
    loop.mp.forward([&] { return loop.model->forward(batch(1) * 1000); });
  }
  EXPECT_TRUE(loop.step(batch(1)));
  const auto inputs = history(loop.mp, "input", "middle.weight");
  ASSERT_EQ(inputs.size(), 2u);
  EXPECT_LT(inputs[1], 10 * inputs[0]);
  // Nor does a skipped step, or one that was dropped.
  at::Tensor bad = batch(2);
  bad[3][4] = kInf;
  EXPECT_FALSE(loop.step(bad));
  EXPECT_EQ(history(loop.mp, "input", "middle.weight"), inputs);
  loop.mp.backward(
      loop.mp.forward([&] { return loop.model->forward(batch(3) * 1000).to(at::kFloat).sum(); }));
  loop.mp.zero_grad();
  EXPECT_TRUE(loop.step(batch(4)));
  EXPECT_LT(history(loop.mp, "input", "middle.weight")[2], 10 * inputs[0]);
}

TEST(Histories, WrapAroundAndGiveTheScaleByMaxOrMostRecent) {
  for (const std::int64_t length : {std::int64_t{1}, std::int64_t{31}, std::int64_t{1024}})
    for (const auto take : {DelayedScaling::Take::Max, DelayedScaling::Take::MostRecent}) {
      auto precision = Precision::fp8_delayed();
      precision.recipe->delayed = {.history = length, .take = take};
      precision.quantise("w");
      const at::Tensor w = at::ones({16, 16}).requires_grad_();
      MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
      SGD optimizer(mp.params(), {.lr = 0});
      std::vector<float> seen;
      for (int step = 0; step < length + 20; ++step) {
        const float size = static_cast<float>(1 + (step * 7) % 11);
        const at::Tensor x = at::full({4, 16}, size);
        const std::vector<float> past = history(mp, "input", "w");
        EXPECT_EQ(past, seen);
        mp.backward(mp.forward([&] { return at::linear(x, w).to(at::kFloat).mean(); }));
        const auto grads = mp.inspect_grads();
        EXPECT_TRUE(optimizer.step(grads.clipped_to(1.0)).stepped());
        mp.advance(grads);
        optimizer.zero_grad();
        seen.push_back(size);
        if (seen.size() > static_cast<std::size_t>(length)) seen.erase(seen.begin());
      }
    }
}

TEST(Histories, AStepOfZerosTellsNothing) {
  for (const auto take : {DelayedScaling::Take::Max, DelayedScaling::Take::MostRecent}) {
    auto precision = Precision::fp8_delayed();
    precision.recipe->delayed = {.history = 16, .take = take};
    precision.quantise("w");
    at::manual_seed(4);
    const at::Tensor w = at::randn({16, 16}).requires_grad_();
    MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
    SGD optimizer(mp.params(), {.lr = 0});
    for (int step = 0; step < 6; ++step) {
      // A batch that is masked out, first and later; an expert without tokens.
      const at::Tensor x = step % 3 == 0 ? at::zeros({4, 16})
                           : step == 4   ? at::zeros({0, 16})
                                         : at::randn({4, 16});
      const at::Tensor y = mp.forward([&] { return at::linear(x, w); });
      mp.backward(y.to(at::kFloat).sum());
      const at::Tensor exact = x.to(at::kBFloat16).to(at::kDouble).mm(w.detach().to(at::kDouble).t());
      // Two operands of relative error 2^-4 each, and one rounding to BF16.
      const at::Tensor bound = x.abs().to(at::kDouble).mm(w.detach().abs().to(at::kDouble).t()) * 0.14;
      EXPECT_TRUE(((y.detach().to(at::kDouble) - exact).abs() <= bound).all().item<bool>()) << step;
      const auto grads = mp.inspect_grads();
      EXPECT_TRUE(optimizer.step(grads.unclipped()).stepped());
      mp.advance(grads);
      optimizer.zero_grad();
    }
    EXPECT_EQ(history(mp, "input", "w").size(), 3u);
  }
}

TEST(Histories, ACheckpointedRegionCountsOnceAndHasTheSameGradients) {
  const auto run = [](bool checkpointed) {
    Loop loop(Precision::fp8_delayed());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = batch(step);
      const at::Tensor loss = loop.mp.forward([&] {
        const at::Tensor h = at::gelu(loop.model->first(x));
        const auto region = [&](const at::Tensor& in) {
          return loop.model->other(at::gelu(loop.model->middle(in)));
        };
        return loop.model->last(checkpointed ? checkpoint_activations(region, h) : region(h))
            .to(at::kFloat)
            .square()
            .mean();
      });
      loop.mp.backward(loss);
      loop.finish();
    }
    return loop.mp.state_dict();
  };
  const StateDict plain = run(false), checkpointed = run(true);
  for (const auto& [name, value] : plain)
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      EXPECT_TRUE(at::equal(*tensor, checkpointed.tensor(name))) << name;
    }
}

TEST(Histories, MicroBatchesAndTwoForwardsAreOneStep) {
  Loop loop(Precision::fp8_delayed(), Accumulation::Fp32);
  float largest = 0;
  for (int micro = 0; micro < 3; ++micro) {
    const at::Tensor x = batch(micro) * (micro == 1 ? 5 : 1);
    const at::Tensor h = loop.mp.forward([&] { return at::gelu(loop.model->first(x)); });
    largest = std::max(largest, h.detach().abs().max().item<float>());
    loop.mp.backward(
        loop.mp.forward([&] { return loop.model->forward(x).to(at::kFloat).square().mean() / 3; }));
  }
  loop.finish();
  EXPECT_EQ(history(loop.mp, "input", "middle.weight"), (std::vector<float>{largest}));
}

TEST(Recipes, AValueThatIsNotFiniteSkipsTheStepWhereverItAppears) {
  for (const Precision& precision : all_precisions())
    for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
      Loop loop(precision);
      EXPECT_TRUE(loop.step(batch(0)));
      const auto weights = at::cat(
          {loop.model->middle->weight.detach().flatten(), loop.model->other->weight.detach().flatten()});
      at::Tensor x = batch(1);
      x[2][3] = bad;  // the input of every layer
      EXPECT_FALSE(loop.step(x)) << precision.name() << " input " << bad;
      // A gradient.
      const at::Tensor y = loop.mp.forward([&] { return loop.model->forward(batch(2)); });
      const at::Tensor loss = y.to(at::kFloat).square().mean();
      y.register_hook([&](const at::Tensor& grad) {
        at::Tensor other = grad.clone();
        other[1][1] = bad;
        return other;
      });
      loop.mp.backward(loss);
      EXPECT_FALSE(loop.finish()) << precision.name() << " gradient " << bad;
      EXPECT_TRUE(at::equal(weights, at::cat({loop.model->middle->weight.detach().flatten(),
                                              loop.model->other->weight.detach().flatten()})));
      EXPECT_TRUE(loop.step(batch(3))) << precision.name();
    }
}

TEST(Recipes, ATensorOfZerosIsZero) {
  for (const Precision& precision : all_precisions()) {
    auto chosen = precision;
    chosen.quantise("w");
    const at::Tensor w = at::randn({32, 32}).requires_grad_();
    MixedPrecision mp(chosen, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
    const at::Tensor y = mp.forward([&] { return at::linear(at::zeros({8, 32}), w); });
    EXPECT_TRUE((y == 0).all().item<bool>()) << precision.name();
    y.backward(at::zeros_like(y));
    EXPECT_TRUE((w.grad() == 0).all().item<bool>()) << precision.name();
  }
}

TEST(Recipes, AResumedRunIsTheUninterruptedOne) {
  for (const Precision& precision : all_precisions()) {
    Loop whole(precision), first(precision);
    for (int step = 0; step < 6; ++step) whole.step(batch(step));
    for (int step = 0; step < 3; ++step) first.step(batch(step));
    const StateDict model = first.mp.state_dict(), optimizer = first.optimizer.state_dict();
    Loop second(precision);
    second.mp.load_state_dict(model);
    second.optimizer.load_state_dict(optimizer);
    for (int step = 3; step < 6; ++step) second.step(batch(step));
    const StateDict a = whole.mp.state_dict(), b = second.mp.state_dict();
    for (const auto& [name, value] : a)
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        EXPECT_TRUE(at::equal(*tensor, b.tensor(name))) << precision.name() << " " << name;
      }
  }
}

TEST(Recipes, TrainALayerThatIsUsedTwiceAndOneThatIsNeverUsed) {
  for (const Precision& precision : all_precisions()) {
    const auto model = make_mlp();
    auto mp = take_in(precision, *model);
    AdamW optimizer(mp.params(), {.lr = 1e-2});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = batch(step);
      mp.backward(mp.forward([&] {
        at::Tensor h = at::gelu(model->first(x));
        for (int use = 0; use < 2; ++use) h = at::gelu(model->middle(h));
        return model->last(h).to(at::kFloat).square().mean();
      }));
      const auto grads = mp.inspect_grads();
      EXPECT_TRUE(optimizer.step(grads.clipped_to(1.0)).stepped());
      mp.advance(grads);
      optimizer.zero_grad();
    }
    EXPECT_EQ(mp.quantised_uses("middle.weight"), 6);
    EXPECT_EQ(mp.quantised_uses("other.weight"), 0);
  }
}

TEST(Recipes, SizesThatDoNotFitAreRefusedAsLibTorchRefusesThem) {
  auto precision = Precision::fp8_current();
  precision.quantise("w");
  const at::Tensor w = at::randn({32, 16}).requires_grad_();
  MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
  const auto in_scope = [&](auto function) { return mp.forward(function); };
  EXPECT_THROW(in_scope([&] { return at::linear(at::randn({4, 15}), w); }), c10::Error);
  EXPECT_THROW(in_scope([&] { return at::linear(at::randn({4, 16}), w, at::randn({31})); }), c10::Error);
  EXPECT_THROW(in_scope([&] { return at::mm(at::randn({16}), w.t()); }), c10::Error);
  EXPECT_EQ(in_scope([&] { return at::linear(at::randn({16}), w); }).sizes(),
            (std::vector<std::int64_t>{32}));
  EXPECT_EQ(in_scope([&] { return at::linear(at::randn({2, 3, 16}), w); }).sizes(),
            (std::vector<std::int64_t>{2, 3, 32}));
  EXPECT_EQ(in_scope([&] { return at::linear(at::randn({0, 16}), w); }).sizes(),
            (std::vector<std::int64_t>{0, 32}));
}

TEST(Recipes, AnInputOfThreeDimensionsIsRowsOfTwo) {
  for (const Precision& precision : all_precisions())
    for (const bool with_bias : {false, true}) {
      auto chosen = precision;
      chosen.quantise("*weight");
      const auto run = [&](bool three) {
        at::manual_seed(8);
        torch::nn::Linear linear(torch::nn::LinearOptions(32, 48).bias(with_bias));
        auto mp = MixedPrecision(chosen, linear, {.autocast = kAnyMachine});
        const at::Tensor x = at::randn({6, 5, 32}).to(at::kBFloat16).requires_grad_();
        const at::Tensor y = mp.forward([&] { return linear(three ? x : x.view({30, 32})); });
        y.backward(at::ones_like(y));
        return std::vector<at::Tensor>{y.detach().view({30, 48}), x.grad(), linear->weight.grad()};
      };
      const auto two = run(false), three = run(true);
      for (std::size_t i = with_bias ? 1 : 0; i < two.size(); ++i)
        EXPECT_TRUE(at::equal(two[i], three[i])) << precision.name() << " " << i;
      // With three dimensions torch::nn::Linear adds its bias, below 0.18, in place to an output that is
      // rounded already: 2^-8 of what stood there and 2^-8 of the sum, twice.
      const at::Tensor bound = (two[0].to(at::kFloat).abs() + 0.18) * (2 * 0x1p-8);
      EXPECT_TRUE(((two[0] - three[0]).to(at::kFloat).abs() <= bound).all().item<bool>()) << precision.name();
    }
}

TEST(Recipes, BackwardInsideTheScopeHasTheSameGradients) {
  for (const Precision& precision : all_precisions()) {
    SCOPED_TRACE(precision.name());
    const auto grads_of = [&](bool inside) {
      Loop loop(precision);
      const auto loss = [&] { return loop.model->forward(batch(0)).to(at::kFloat).square().mean(); };
      if (inside)
        loop.mp.forward([&] { loop.mp.backward(loss()); });
      else
        loop.mp.backward(loop.mp.forward(loss));
      std::vector<at::Tensor> grads;
      for (const at::Tensor& parameter : loop.model->parameters()) grads.push_back(parameter.grad());
      return grads;
    };
    const auto inside = grads_of(true), outside = grads_of(false);
    for (std::size_t i = 0; i < inside.size(); ++i) EXPECT_TRUE(at::equal(inside[i], outside[i])) << i;
  }
}

TEST(Recipes, TheTransposeOfAWeightStandsInTheGraphItself) {
  auto precision = Precision::mxfp8();
  precision.quantise("w");
  at::manual_seed(5);
  const at::Tensor w = at::randn({32, 16}).requires_grad_();
  MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
  const at::Tensor x = at::randn({8, 16});
  at::Tensor stopped;
  {
    const torch::NoGradGuard no_grad;
    stopped = w.t();
  }
  EXPECT_EQ(mp.forward([&] { return at::mm(x, stopped); }).requires_grad(),
            at::mm(x.to(at::kBFloat16), stopped).requires_grad());
  mp.forward([&] { return at::mm(x, stopped).to(at::kFloat).sum(); }).backward();
  EXPECT_FALSE(w.grad().defined());

  const at::Tensor turned = w.t();
  int hooked = 0;
  turned.register_hook([&](const at::Tensor&) { ++hooked; });
  const at::Tensor loss = mp.forward([&] { return at::mm(x, turned).to(at::kFloat).sum(); });
  const auto grads = torch::autograd::grad({loss}, {turned, w});
  EXPECT_EQ(hooked, 1);
  EXPECT_TRUE(at::equal(grads[0].t(), grads[1]));
  EXPECT_EQ(mp.quantised_uses("w"), 3);
}

TEST(Recipes, AHadamardTransformOfForwardIsNotThatOfTheWeightGradient) {
  auto precision = Precision::fp8_current();
  for (ProductRule* rule : {&precision.recipe->forward, &precision.recipe->weight_grad})
    rule->left.hadamard = rule->right.hadamard = true;
  precision.quantise("w");
  at::manual_seed(6);
  const at::Tensor w = at::randn({32, 16}).requires_grad_();
  MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
  const at::Tensor x = at::randn({48, 16}), g = at::randn({48, 32});
  mp.backward(mp.forward([&] { return (at::linear(x, w).to(at::kFloat) * g).sum(); }));
  const at::Tensor exact = g.t().mm(x);
  // Errors of 2^-4 and 2^-3, uniform, in 48 terms: 0.05 of the norm.
  EXPECT_LT(((w.grad().to(at::kFloat) - exact).norm() / exact.norm()).item<double>(), 0.1);
}

TEST(Recipes, ASkippedOrDroppedStepGivesItsRandomNumbersBack) {
  const auto run = [](bool disturbed) {
    Loop loop(Precision::nvfp4());
    loop.step(batch(0));
    if (disturbed) {
      at::Tensor bad = batch(1);
      bad[3][4] = kInf;
      EXPECT_FALSE(loop.step(bad));
      loop.mp.backward(loop.mp.forward([&] { return loop.model->forward(batch(2)).to(at::kFloat).sum(); }));
      loop.mp.zero_grad();
    }
    loop.step(batch(3));
    return loop.model->middle->weight.detach().clone();
  };
  EXPECT_TRUE(at::equal(run(true), run(false)));
}

TEST(Recipes, AStateOfAStepThatWillNotBeFinishedIsWithoutIt) {
  Loop loop(Precision::fp8_delayed()), other(Precision::fp8_delayed());
  loop.step(batch(0));
  const StateDict clean = loop.mp.state_dict();
  loop.mp.forward([&] { return loop.model->forward(batch(1) * 1000); });
  const StateDict saved = loop.mp.state_dict();
  other.mp.load_state_dict(saved);
  const StateDict loaded = other.mp.state_dict();
  for (const auto& [name, value] : clean) {
    if (!name.starts_with("recipe.amax.")) continue;
    EXPECT_TRUE(at::equal(saved.tensor(name), clean.tensor(name))) << name;
    EXPECT_TRUE(at::equal(loaded.tensor(name), clean.tensor(name))) << name;
  }
  other.step(batch(2));
  EXPECT_LT(history(other.mp, "input", "middle.weight")[1],
            10 * history(other.mp, "input", "middle.weight")[0]);
  // A shorter history takes the newest.
  auto shorter = Precision::fp8_delayed();
  shorter.recipe->delayed->history = 1;
  Loop brief(shorter);
  brief.mp.load_state_dict(other.mp.state_dict());
  EXPECT_EQ(history(brief.mp, "input", "middle.weight"),
            (std::vector<float>{history(other.mp, "input", "middle.weight")[1]}));
  StateDict broken = other.mp.state_dict();
  broken.set("recipe.amax.input.middle.weight", at::full({3}, kInf));
  EXPECT_THROW(brief.mp.load_state_dict(broken), Error);
}

TEST(Recipes, HaveNoSecondDerivativeAndSaySo) {
  auto precision = Precision::mxfp8();
  precision.quantise("w");
  const at::Tensor w = at::randn({32, 16}).requires_grad_();
  MixedPrecision mp(precision, std::vector<NamedParameter>{{"w", w}}, {.autocast = kAnyMachine});
  const at::Tensor y = mp.forward([&] { return at::linear(at::randn({4, 16}), w); });
  EXPECT_THROW(
      torch::autograd::grad({y.to(at::kFloat).sum()}, {w}, {}, /*retain_graph=*/true, /*create_graph=*/true),
      Error);
}

TEST(Recipes, AModelThatTrainsBesideOneIsBitForBitUnchanged) {
  const auto trained_beside = [](const std::vector<Precision>& recipes) {
    const auto plain = make_mlp();
    torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(1e-2));
    std::vector<std::unique_ptr<Loop>> loops;
    for (const Precision& recipe : recipes) loops.push_back(std::make_unique<Loop>(recipe));
    for (int step = 0; step < 4; ++step) {
      const at::Tensor loss = plain->forward(batch(step)).square().mean();
      // Between its forward and its backward, too.
      for (const auto& loop : loops) loop->step(batch(step));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
    return plain;
  };
  const auto alone = trained_beside({}), beside = trained_beside(all_precisions());
  const auto expected = alone->parameters(), found = beside->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
}

TEST(Recipes, AreRefusedWhereTheyDoNotFit) {
  const auto model = make_mlp();
  auto fp32 = Precision::fp32();
  fp32.recipe = Recipe::mxfp8();
  EXPECT_THROW(take_in(fp32, *model), Error);
  auto no_recipe = Precision::bf16();
  no_recipe.keep_high("*");
  EXPECT_THROW(take_in(no_recipe, *model), Error);
  auto odd = Precision::nvfp4();
  odd.recipe->weight_grad.left.hadamard = false;
  EXPECT_THROW(take_in(odd, *model), Error);
  auto hidden = Precision::nvfp4();
  hidden.recipe->forward.left.scale = ScaleRule::PowerOfTwo;
  EXPECT_THROW(take_in(hidden, *model), Error);
  auto mixed = Precision::fp8_delayed();
  mixed.recipe->forward.left.block_along = 32;
  EXPECT_THROW(take_in(mixed, *model), Error);
  auto turned = Precision::fp8_delayed();
  turned.recipe->weight_grad.left.hadamard = turned.recipe->weight_grad.right.hadamard = true;
  EXPECT_THROW(take_in(turned, *model), Error);
  auto whole = Precision::nvfp4();
  whole.recipe->forward.left.block_along = whole.recipe->forward.left.block_across = 0;
  EXPECT_THROW(take_in(whole, *model), Error);
  for (const bool left : {true, false}) {  // forward is computed again; gradients are drawn once
    auto drawn = Precision::nvfp4();
    (left ? drawn.recipe->forward.left : drawn.recipe->forward.right).stochastic = true;
    EXPECT_NE(error_of([&] { drawn.recipe->check(); }).find("forward: an operand is rounded stochastically"),
              std::string::npos);
    drawn.recipe->forward.quantised = false;
    EXPECT_EQ(error_of([&] { drawn.recipe->check(); }), "no error");
  }
  {  // Other layers: the message names one and says what to do.
    const auto one = make_mlp(), two = make_mlp();
    auto fewer = Precision::mxfp8();
    fewer.keep_high("other.weight");
    auto some = take_in(fewer, *one), all = take_in(Precision::mxfp8(), *two);
    const auto message = [](MixedPrecision& into, const MixedPrecision& from) -> std::string {
      try {
        into.load_state_dict(from.state_dict());
        return "";
      } catch (const Error& error) {
        return error.what();
      }
    };
    EXPECT_NE(message(some, all).find("'other.weight' follows the recipe in the saved state, not here"),
              std::string::npos);
    EXPECT_NE(message(all, some).find("'other.weight' follows the recipe here"), std::string::npos);
  }
  auto saved = take_in(Precision::mxfp8(), *model).state_dict();
  const auto other = make_mlp();
  EXPECT_THROW(take_in(Precision::fp8_current(), *other).load_state_dict(saved), Error);
}

}  // namespace
}  // namespace halfstep::testing
