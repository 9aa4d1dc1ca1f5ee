// Calls that are missing, or in another order, and what a program does beside Halfstep's calls: told, or
// right.
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/machine.h>
#include <halfstep/memory.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cmath>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/error_of.h"
#include "support/small_models.h"

namespace halfstep {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionSuccess;
using testing::bit_equal;
using testing::error_of;
using testing::kAnyMachine;
using testing::Mlp;

const MixedPrecisionOptions kHere{.autocast = kAnyMachine};

::testing::AssertionResult says(const std::string& message, const std::string& part) {
  if (message.find(part) != std::string::npos) return AssertionSuccess();
  return AssertionFailure() << "'" << part << "' is not in: " << message;
}

std::shared_ptr<Mlp> fresh_model() {
  torch::manual_seed(1);
  return std::make_shared<Mlp>(20, 24, 10);
}

at::Tensor batch_loss(Mlp& model, int number = 0) {
  torch::manual_seed(100 + number);
  const at::Tensor x = torch::randn({32, 20});
  return model.loss(x, torch::randint(10, {32}));
}

Precision fp16_from(double loss_scale, WeightStorage storage = WeightStorage::Fp32Master) {
  auto precision = Precision::fp16(storage);
  precision.loss_scaling->initial = loss_scale;
  return precision;
}

TEST(CallOrder, PlainBackwardUnderALossScaleIsRefused) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere);
  mp.forward([&] { return batch_loss(*model); }).backward();
  EXPECT_TRUE(says(error_of([&] { (void)mp.inspect_grads(); }), "does not carry the loss scale"));
}

TEST(CallOrder, FreeInspectionOfScaledGradientsNeedsTheirScale) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere);
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  EXPECT_TRUE(says(error_of([&] { (void)inspect_grads(mp.params()); }), "carries a loss scale"));
  EXPECT_EQ(inspect_grads(mp.params(), mp.loss_scale()).norm(), mp.inspect_grads().norm());
}

TEST(CallOrder, ALossScaleThatGradientsCarryCannotBeSet) {
  for (const Accumulation accumulation : {Accumulation::None, Accumulation::Fp32}) {
    const auto model = fresh_model();
    MixedPrecision mp(fp16_from(65536), *model, {.autocast = kAnyMachine, .accumulation = accumulation});
    mp.backward(mp.forward([&] { return batch_loss(*model); }));
    const LossScaling capped{.initial = 1024, .cap = 1024};
    EXPECT_TRUE(
        says(error_of([&] { mp.set_loss_scaling(capped); }), "gradients of this step carry the first"));
    EXPECT_EQ(mp.loss_scale(), 65536);
    mp.set_loss_scaling({.growth_interval = 7});  // the scale stays
    mp.zero_grad();
    mp.set_loss_scaling(capped);
    EXPECT_EQ(mp.loss_scale(), 1024);
  }
}

TEST(CallOrder, AdvanceWithAnothersGradientsChangesNothing) {
  const auto model = fresh_model(), other = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere), other_mp(fp16_from(512), *other, kHere);
  AdamW optimizer(mp.params());
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  other_mp.backward(other_mp.forward([&] { return batch_loss(*other); }));
  const auto grads = mp.inspect_grads(), others = other_mp.inspect_grads();
  (void)optimizer.step(grads.unclipped());
  EXPECT_TRUE(says(error_of([&] { mp.advance(others); }), "carry a loss scale of 512"));
  EXPECT_EQ(error_of([&] { mp.advance(grads); }), "no error");
}

TEST(CallOrder, AParameterOfAnotherShapeIsRefused) {
  for (const Accumulation accumulation : {Accumulation::None, Accumulation::Fp32, Accumulation::Bf16Kahan})
    for (const Precision& precision : {Precision::fp32(), Precision::bf16()})
      for (const int64_t rows : {3, 40000}) {
        torch::nn::Embedding table(7, 64);
        MixedPrecision mp(precision, table, {.autocast = kAnyMachine, .accumulation = accumulation});
        AdamW optimizer(mp.params());
        const auto step = [&] {
          mp.backward(mp.forward([&] { return table(torch::arange(3)).sum(); }));
          mp.close_sum();
          const auto grads = mp.inspect_grads();
          (void)optimizer.step(grads.unclipped());
          mp.advance(grads);
          optimizer.zero_grad();
        };
        step();
        table->weight.set_data(torch::ones({rows, 64}, table->weight.scalar_type()));
        EXPECT_TRUE(says(error_of(step), "'weight' has shape")) << precision.name() << " " << rows;
      }
}

TEST(CallOrder, ABufferThatGrewInASkippedStepIsPutBack) {
  struct Grows : torch::nn::Module {
    Grows()
        : linear(register_module("linear", torch::nn::Linear(4, 1))),
          seen(register_buffer("seen", torch::ones({1}))) {}
    at::Tensor loss(const at::Tensor& x) {
      const at::NoGradGuard no_grad;
      seen.resize_({seen.numel() + 1});
      const at::AutoGradMode grad(true);
      return linear(x).to(at::kFloat).mean();
    }
    torch::nn::Linear linear;
    at::Tensor seen;
  } model;
  MixedPrecision mp(fp16_from(256), model, kHere);
  AdamW optimizer(mp.params());
  mp.backward(mp.forward([&] { return model.loss(torch::full({2, 4}, INFINITY)); }));
  const auto grads = mp.inspect_grads();
  EXPECT_FALSE(optimizer.step(grads.unclipped()).stepped());
  mp.advance(grads);
  EXPECT_EQ(model.seen.numel(), 1);
  EXPECT_EQ(mp.loss_scale(), 128);
}

TEST(CallOrder, PlainBackwardBesideAnAccumulationIsRefused) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, {.autocast = kAnyMachine, .accumulation = Accumulation::Fp32});
  mp.forward([&] { return batch_loss(*model); }).backward();
  EXPECT_TRUE(says(error_of([&] { mp.close_sum(); }), "in no sum of micro-batches"));
}

TEST(CallOrder, PlainBackwardInBf16IsTheSameAsOurs) {
  const auto ours = fresh_model(), plain = fresh_model();
  MixedPrecision mp(Precision::bf16(), *ours, kHere), plain_mp(Precision::bf16(), *plain, kHere);
  mp.backward(mp.forward([&] { return batch_loss(*ours); }));
  plain_mp.forward([&] { return batch_loss(*plain); }).backward();
  EXPECT_EQ(mp.inspect_grads().norm(), plain_mp.inspect_grads().norm());
}

TEST(CallOrder, ForgottenAdvanceIsToldAtTheNextStep) {
  for (const auto& precision : {Precision::bf16(), Precision::fp32(), fp16_from(256)}) {
    const auto model = fresh_model();
    MixedPrecision mp(precision, *model, kHere);
    AdamW optimizer(mp.params());
    const auto step = [&] {
      mp.backward(mp.forward([&] { return batch_loss(*model); }));
      (void)optimizer.step(mp.inspect_grads().unclipped());
      optimizer.zero_grad();
    };
    step();
    EXPECT_TRUE(says(error_of(step), "advance was not called")) << precision.name();
  }
}

TEST(CallOrder, ForgottenAdvanceIsToldWithPlainBackwardToo) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  AdamW optimizer(mp.params());
  const auto step = [&] {
    mp.forward([&] { return batch_loss(*model); }).backward();
    (void)optimizer.step(mp.inspect_grads().unclipped());
    optimizer.zero_grad();
  };
  step();
  EXPECT_TRUE(says(error_of(step), "advance was not called"));
}

TEST(CallOrder, ForgottenAdvanceIsToldWhereANewGradientTakesTheOldOnesPlaceInMemory) {
  torch::nn::Linear model(torch::nn::LinearOptions(4, 4).bias(false));
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  AdamW optimizer(mp.params());
  const auto step = [&] {
    // Nothing is allocated since zero_grad, so that the allocator gives the same piece again.
    model->weight.mutable_grad() = at::ones_like(model->weight);
    (void)optimizer.step(mp.inspect_grads().unclipped());
    optimizer.zero_grad();
  };
  step();
  EXPECT_TRUE(says(error_of(step), "advance was not called"));
}

TEST(CallOrder, GradientsMayBeInspectedTwiceInAStep) {
  for (const auto& precision : {Precision::bf16(), fp16_from(256)}) {
    const auto model = fresh_model();
    MixedPrecision mp(precision, *model, kHere);
    AdamW optimizer(mp.params());
    mp.backward(mp.forward([&] { return batch_loss(*model); }));
    const auto first = mp.inspect_grads(GradDetail::PerParam), second = mp.inspect_grads();
    EXPECT_EQ(first.norm(), second.norm());
    EXPECT_TRUE(optimizer.step(second.unclipped()).stepped());
    mp.advance(second);
  }
}

TEST(CallOrder, StepWithoutASummaryUnderALossScaleIsRefused) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere);
  AdamW adamw(mp.params());
  SGD sgd(mp.params());
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  EXPECT_TRUE(says(error_of([&] { (void)adamw.step({}); }), "carries a loss scale"));
  EXPECT_TRUE(says(error_of([&] { (void)sgd.step({}); }), "carries a loss scale"));
}

/// A step with an optimizer of torch.
void step_with(torch::optim::Optimizer& optimizer, Mlp& model, MixedPrecision& mp) {
  optimizer.zero_grad();
  mp.backward(mp.forward([&] { return batch_loss(model); }));
  const auto grads = mp.inspect_grads();
  optimizer.step();
  mp.advance(grads);
}

TEST(CallOrder, OptimizerOfTorchOverLowWeightsIsNoticed) {
  for (const auto storage : {WeightStorage::SplitMaster, WeightStorage::Fp32Master, WeightStorage::Kahan})
    for (const bool adamw : {false, true}) {
      const auto model = fresh_model();
      MixedPrecision mp(Precision::bf16(storage), *model, kHere);
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (adamw)
        optimizer =
            std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-6));
      else
        optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 1e-6);
      for (int i = 0; i < 9; ++i) step_with(*optimizer, *model, mp);
      EXPECT_TRUE(says(error_of([&] { step_with(*optimizer, *model, mp); }),
                       "no optimizer of Halfstep updated them"));
    }
  {  // With a backward of its own, which BF16 allows.
    const auto model = fresh_model();
    MixedPrecision mp(Precision::bf16(), *model, kHere);
    torch::optim::SGD optimizer(model->parameters(), 1e-6);
    const auto step = [&] {
      mp.forward([&] { return batch_loss(*model); }).backward();
      const auto grads = mp.inspect_grads();
      optimizer.step();
      mp.advance(grads);
      optimizer.zero_grad();
    };
    for (int i = 0; i < 9; ++i) step();
    EXPECT_TRUE(says(error_of(step), "no optimizer of Halfstep updated them"));
  }
  // With FP32 weights it is torch.amp's way, and right.
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(WeightStorage::Fp32), *model, kHere);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int i = 0; i < 12; ++i) step_with(optimizer, *model, mp);
}

TEST(CallOrder, OptimizerOfTorchUnderALossScaleIsNoticedWithFp32WeightsToo) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(2, WeightStorage::Fp32), *model, kHere);
  torch::optim::SGD optimizer(model->parameters(), 1e-6);
  for (int i = 0; i < 9; ++i) step_with(optimizer, *model, mp);
  EXPECT_TRUE(says(error_of([&] { step_with(optimizer, *model, mp); }), "carry a loss scale"));
}

TEST(CallOrder, OptimizerOfTorchThatHasRuinedTheWeightsIsNamedAllTheSame) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(65536), *model, kHere);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(100).momentum(0.9));
  for (int i = 0; i < 9; ++i) step_with(optimizer, *model, mp);
  EXPECT_FALSE(full_precision(mp.params()[0]).isfinite().all().item<bool>());
  EXPECT_TRUE(says(error_of([&] { step_with(optimizer, *model, mp); }), "torch::optim"));
}

TEST(CallOrder, GradientsMayBeInspectedAgainAfterTheStep) {
  for (const auto& precision : {Precision::bf16(), Precision::bf16(WeightStorage::Fp32), fp16_from(256)}) {
    const auto model = fresh_model();
    MixedPrecision mp(precision, *model, kHere);
    AdamW optimizer(mp.params());
    mp.backward(mp.forward([&] { return batch_loss(*model); }));
    const auto grads = mp.inspect_grads();
    EXPECT_TRUE(optimizer.step(grads.unclipped()).stepped());
    EXPECT_EQ(mp.inspect_grads(GradDetail::PerParam).norm(), grads.norm());
    mp.advance(grads);
  }
}

TEST(CallOrder, PlainBackwardBeforeOursUnderALossScaleIsRefused) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256, WeightStorage::Fp32), *model, kHere);
  mp.forward([&] { return batch_loss(*model); }).backward();
  EXPECT_TRUE(says(error_of([&] { mp.backward(mp.forward([&] { return batch_loss(*model); })); }),
                   "still has a gradient"));
}

TEST(CallOrder, ZeroGradStartsTheSumOfMicroBatchesAgain) {
  for (const auto accumulation : {Accumulation::Fp32, Accumulation::Bf16Kahan, Accumulation::None}) {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    MixedPrecision mp(Precision::bf16(), model, {.autocast = kAnyMachine, .accumulation = accumulation});
    mp.backward(model->weight.sum() * 1000);
    mp.zero_grad();
    mp.backward(model->weight.sum());
    mp.close_sum();
    EXPECT_EQ(mp.inspect_grads().norm(), 1);
  }
}

TEST(CallOrder, StepsLeftOutOnPurposeAreNoForeignOptimizer) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  AdamW optimizer(mp.params());
  for (int i = 0; i < 40; ++i) {
    mp.backward(mp.forward([&] { return batch_loss(*model); }));
    const auto grads = mp.inspect_grads();
    if (i % 8 == 7) (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
  }
}

TEST(CallOrder, WeightClippingBetweenStepAndAdvanceIsNoForeignOptimizer) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  AdamW optimizer(mp.params());
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  const auto grads = mp.inspect_grads();
  (void)optimizer.step(grads.unclipped());
  {
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.clamp_(-0.1, 0.1);
  }
  EXPECT_EQ(error_of([&] { mp.advance(grads); }), "no error");
}

TEST(CallOrder, ParameterWithoutAGradientIsNamed) {
  struct BrokenTie : torch::nn::Module {
    BrokenTie() {
      used = register_module("used", torch::nn::Linear(8, 4));
      forgotten = register_module("forgotten", torch::nn::Linear(torch::nn::LinearOptions(8, 4).bias(false)));
    }
    torch::nn::Linear used{nullptr}, forgotten{nullptr};
  } model;
  MixedPrecision mp(Precision::bf16(), model, kHere);
  AdamW optimizer(mp.params());
  mp.backward(mp.forward([&] { return model.used(torch::ones({2, 8})).square().mean(); }));
  const auto grads = mp.inspect_grads();
  EXPECT_EQ(grads.without_grad(), std::vector<std::string>{"forgotten.weight"});
  const auto report = optimizer.step(grads.unclipped());
  EXPECT_EQ(report.without_grad(), grads.without_grad());
  EXPECT_EQ(report.sentence(), "stepped; 1 parameter without a gradient, first forgotten.weight");
}

TEST(CallOrder, SparseGradientsAreRefusedBeforeBackward) {
  struct Model : torch::nn::Module {
    explicit Model(bool bag) {
      register_module("inner", torch::nn::Linear(2, 2));
      if (bag)
        register_module("table", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(20, 8).sparse(true)));
      else
        register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 8).sparse(true)));
    }
  };
  for (const bool bag : {false, true}) {
    Model model(bag);
    EXPECT_TRUE(says(error_of([&] { MixedPrecision(Precision::bf16(), model, kHere); }), "'table.weight'"));
    for (const auto& p : model.parameters()) EXPECT_EQ(p.scalar_type(), at::kFloat);
    model.named_parameters()["table.weight"].requires_grad_(false);
    EXPECT_EQ(error_of([&] { MixedPrecision(Precision::bf16(), model, kHere); }), "no error");
  }
}

TEST(CallOrder, SecondMixedPrecisionOnOneModelIsToldWhy) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  EXPECT_TRUE(says(error_of([&] { MixedPrecision(Precision::bf16(), *model, kHere); }),
                   "If a MixedPrecision holds this model, use that one"));
}

TEST(CallOrder, PlainBackwardAfterOursBesideAnAccumulationIsRefused) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, {.autocast = kAnyMachine, .accumulation = Accumulation::Fp32});
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  mp.forward([&] { return batch_loss(*model, 1); }).backward();
  EXPECT_TRUE(says(error_of([&] { mp.close_sum(); }), "in no sum of micro-batches"));
}

TEST(CallOrder, ABackwardThatThrowsIsNone) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_THROW(mp.backward(mp.forward([&] { return batch_loss(*model); })), c10::Error);
  }
  mp.forward([&] { return batch_loss(*model); }).backward();
  EXPECT_TRUE(says(error_of([&] { (void)mp.inspect_grads(); }), "does not carry the loss scale"));
}

TEST(CallOrder, AMicroBatchThatThrowsIsInNoSum) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, {.autocast = kAnyMachine, .accumulation = Accumulation::Fp32});
  const auto train = [&](int number) { mp.backward(mp.forward([&] { return batch_loss(*model, number); })); };
  train(0);
  mp.close_sum();
  const GradSummary alone = mp.inspect_grads();
  mp.zero_grad();
  train(0);
  // Throws when most gradients are there.
  const auto first = mp.params().front().working;
  const auto hook =
      first.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no"); });
  EXPECT_THROW(train(1), std::runtime_error);
  first.remove_hook(hook);
  mp.close_sum();
  EXPECT_EQ(mp.inspect_grads().norm(), alone.norm());
}

TEST(CallOrder, AdvanceTwiceIsRefused) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere);
  SGD optimizer(mp.params(), {.lr = 1e-3});
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  const auto grads = mp.inspect_grads();
  (void)optimizer.step(grads.unclipped());
  mp.advance(grads);
  EXPECT_TRUE(
      says(error_of([&] { mp.advance(grads); }), "inspect_grads was not called since the last advance"));
  EXPECT_EQ(mp.loss_scale_state().clean_steps, 1);
}

TEST(CallOrder, GradientsInspectedAgainAfterTheStepAreNoForeignOptimizer) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  SGD optimizer(mp.params(), {.lr = 1e-3});
  for (int number = 0; number < 15; ++number) {
    mp.backward(mp.forward([&] { return batch_loss(*model, number); }));
    const auto grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    (void)mp.inspect_grads(GradDetail::PerParam);
    mp.advance(grads);
    optimizer.zero_grad();
  }
}

TEST(CallOrder, OptimizerOfTorchWithoutInspectAndAdvanceIsNoticed) {
  for (const bool fp16 : {false, true}) {
    const auto model = fresh_model();
    MixedPrecision mp(fp16 ? fp16_from(65536) : Precision::bf16(), *model, kHere);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto step = [&] {
      mp.backward(mp.forward([&] { return batch_loss(*model); }));
      optimizer.step();
      optimizer.zero_grad();
    };
    for (int i = 0; i < 10; ++i) step();
    EXPECT_TRUE(says(error_of(step), "inspect_grads was not called"));
  }
}

TEST(MixedPrecisionModels, TwoOfOneNameAreRefused) {
  torch::nn::Linear a(4, 4), b(4, 4);
  const std::vector<NamedModel> models{{"n", *a}, {"n", *b}};
  EXPECT_TRUE(
      says(error_of([&] { MixedPrecision mp(Precision::bf16(), models, kHere); }), "are called 'n.weight'"));
}

TEST(MixedPrecisionModels, ABufferInTheMemoryOfAParameterIsRefused) {
  struct Aliased : torch::nn::Module {
    Aliased() {
      weight = register_parameter("weight", torch::ones({4}));
      view = register_buffer("view", weight.detach());
    }
    at::Tensor weight, view;
  } model;
  EXPECT_TRUE(
      says(error_of([&] { MixedPrecision mp(Precision::bf16(), model, kHere); }), "buffer 'view' lies in"));
  const MixedPrecision fp32(Precision::fp32(), model, kHere);  // which keeps its memory
}

TEST(MixedPrecisionState, AParameterWithoutElementsIsLoaded) {
  struct Empty : torch::nn::Module {
    Empty() {
      register_parameter("some", torch::ones({2}));
      register_parameter("none", torch::empty({0, 3}));
    }
  } model;
  MixedPrecision mp(Precision::bf16(), model, kHere);
  mp.load_state_dict(mp.state_dict());
}

TEST(MixedPrecisionState, LoadedInTheMiddleOfAStepLeavesNoGradients) {
  const auto model = fresh_model();
  MixedPrecision mp(fp16_from(256), *model, kHere);
  const StateDict saved = mp.state_dict();
  mp.backward(mp.forward([&] { return batch_loss(*model); }));
  mp.load_state_dict(saved);
  EXPECT_FALSE(mp.inspect_grads().any());
}

/// A linear layer and a batch norm, whose statistics an input of 1e6 spoils in FP16.
struct Normed : torch::nn::Module {
  Normed() {
    linear = register_module("linear", torch::nn::Linear(8, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
  }
  at::Tensor loss(const at::Tensor& x) { return norm(linear(x)).pow(2).mean(); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(SkippedStep, PutsStatisticsBackThoughZeroGradCameBetween) {
  for (const int place : {0, 1}) {  // between forward and backward, between step and advance
    torch::manual_seed(3);
    Normed model;
    MixedPrecision mp(fp16_from(256), model, kHere);
    SGD optimizer(mp.params(), {.lr = 1e-2});
    const at::Tensor before = model.norm->running_mean.clone();
    const auto loss = mp.forward([&] { return model.loss(torch::randn({32, 8}) * 1e6); });
    if (place == 0) mp.zero_grad();
    mp.backward(loss);
    const auto grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.unclipped());
    EXPECT_FALSE(report.stepped());
    if (place == 1) optimizer.zero_grad();
    mp.advance(grads);
    EXPECT_TRUE(bit_equal(model.norm->running_mean, before)) << place;
  }
}

TEST(SkippedStep, AnAbandonedForwardLeavesNoNanInStatistics) {
  torch::manual_seed(3);
  Normed model;
  MixedPrecision mp(fp16_from(256), model, kHere);
  SGD optimizer(mp.params(), {.lr = 1e-2});
  (void)mp.forward([&] { return model.loss(torch::randn({32, 8}) * 1e6); });
  mp.zero_grad();  // the loss was bad: on with the next batch
  mp.backward(mp.forward([&] { return model.loss(torch::randn({32, 8})); }));
  const auto grads = mp.inspect_grads();
  EXPECT_TRUE(optimizer.step(grads.unclipped()).stepped());
  mp.advance(grads);
  EXPECT_TRUE(model.norm->running_mean.isfinite().all().item<bool>());
}

TEST(MixedPrecisionModels, EmulatedPrecisionIsCalledEmulated) {
  const Machine machine = inspect_machine();
  torch::nn::Linear linear(4, 4);
  const MixedPrecision mp(Precision::fp16(), linear, kHere);
  if (machine.cuda.devices.empty()) {
    for (const PrecisionSupport& each : machine.cpu.precisions)
      if (each.precision == "FP16") {
        EXPECT_EQ(mp.support().support, each.support);
        EXPECT_EQ(mp.support().reason, each.reason);
      }
  }
  EXPECT_EQ(mp.support().precision, "FP16");
  EXPECT_FALSE(mp.support().reason.empty());
}

TEST(MixedPrecisionModels, HolderIsTakenAsItsModule) {
  torch::nn::Linear linear(4, 4);
  torch::nn::Sequential sequential(torch::nn::Linear(4, 4));
  EXPECT_EQ(MixedPrecision(Precision::bf16(), linear, kHere).params().size(), 2u);
  EXPECT_EQ(MixedPrecision(Precision::bf16(), sequential, kHere).params()[0].name, "0.weight");
}

TEST(MixedPrecisionModels, SeveralModelsShareOneLossScale) {
  const auto train = [](bool together) {
    const auto a = fresh_model(), b = fresh_model();
    std::vector<MixedPrecision> mps;
    if (together) {
      mps.push_back(MixedPrecision(fp16_from(1024), {{"a", *a}, {"b", *b}}, kHere));
    } else {
      mps.push_back(MixedPrecision(fp16_from(1024), *a, kHere));
      mps.push_back(MixedPrecision(fp16_from(1024), *b, kHere));
    }
    std::vector<AdamW> optimizers;
    if (together) {
      optimizers.emplace_back(mps[0].params("a"), AdamWOptions{.lr = 1e-2});
      optimizers.emplace_back(mps[0].params("b"), AdamWOptions{.lr = 1e-3});
    } else {
      optimizers.emplace_back(mps[0].params(), AdamWOptions{.lr = 1e-2});
      optimizers.emplace_back(mps[1].params(), AdamWOptions{.lr = 1e-3});
    }
    for (int i = 0; i < 5; ++i) {
      if (together) {
        mps[0].backward(mps[0].forward([&] { return batch_loss(*a, i) + batch_loss(*b, i); }));
        const auto grads = mps[0].inspect_grads();
        for (auto& optimizer : optimizers) EXPECT_TRUE(optimizer.step(grads.unclipped()).stepped());
        mps[0].advance(grads);
      } else {
        for (int which = 0; which < 2; ++which) {
          const auto& model = which == 0 ? a : b;
          mps[which].backward(mps[which].forward([&] { return batch_loss(*model, i); }));
          const auto grads = mps[which].inspect_grads();
          EXPECT_TRUE(optimizers[which].step(grads.unclipped()).stepped());
          mps[which].advance(grads);
        }
      }
      for (auto& optimizer : optimizers) optimizer.zero_grad();
    }
    std::vector<at::Tensor> weights;
    for (const auto& model : {a, b})
      for (const auto& p : model->parameters()) weights.push_back(p.detach().clone());
    return weights;
  };
  const auto apart = train(false), together = train(true);
  for (std::size_t i = 0; i < apart.size(); ++i) EXPECT_TRUE(bit_equal(apart[i], together[i])) << i;
}

TEST(MixedPrecisionModels, TrunkSharedByTwoLossesIsTheSumOfBoth) {
  const auto grads_of = [](bool two_calls) {
    torch::manual_seed(1);
    torch::nn::Linear trunk(16, 16), left(16, 4), right(16, 4);
    MixedPrecision mp(fp16_from(64), {{"trunk", *trunk}, {"left", *left}, {"right", *right}},
                      {.autocast = kAnyMachine, .accumulation = Accumulation::Fp32});
    const auto [a, b] = mp.forward([&] {
      torch::manual_seed(2);
      const at::Tensor shared = at::gelu(trunk(torch::randn({8, 16})));
      return std::pair(left(shared).square().mean(), right(shared).square().mean());
    });
    if (two_calls) {
      mp.backward(a, {.retain_graph = true});
      mp.backward(b);
    } else {
      mp.backward(a + b);
    }
    mp.close_sum();
    (void)mp.inspect_grads();
    return (trunk->weight.grad() / mp.loss_scale()).to(at::kDouble);
  };
  const at::Tensor both = grads_of(false), each = grads_of(true);
  // FP16 gradients of the two parts, rounded before or after the sum: 2^-11 of their norm each.
  EXPECT_LT((both - each).norm().item<double>(), 4 * 0x1p-11 * both.norm().item<double>());
}

TEST(FrozenParameters, HaveNeitherMasterNorMoments) {
  install_cpu_allocator();
  for (const auto& precision :
       {Precision::bf16(), Precision::fp16(), Precision::bf16(WeightStorage::Kahan)}) {
    torch::nn::Sequential net(torch::nn::Linear(256, 256), torch::nn::Linear(256, 10));
    for (auto& p : net[0]->parameters()) p.requires_grad_(false);
    const auto live = [](MemoryClass which) { return memory_report().live[which]; };
    const auto masters = live(MemoryClass::Master), moments = live(MemoryClass::Moments);
    MixedPrecision mp(precision, net, kHere);
    AdamW optimizer(mp.params());
    const std::size_t trained = 256 * 10 + 10, frozen = 256 * 256 + 256;
    const std::size_t master_bytes = precision.weights == WeightStorage::Fp32Master ? 4 : 2;
    // The allocator rounds each block up to 64 bytes.
    EXPECT_LE(live(MemoryClass::Master) - masters, trained * master_bytes + 4 * 64) << precision.name();
    EXPECT_LE(live(MemoryClass::Moments) - moments, trained * 8 + 8 * 64);
    EXPECT_GT(frozen * master_bytes, 4 * (trained * master_bytes + 4 * 64));  // else the above shows nothing
  }
}

TEST(FrozenParameters, TrainFromTheirWorkingCopyOnceThawed) {
  for (const auto& precision : {Precision::bf16(), Precision::bf16(WeightStorage::Fp32Master), fp16_from(256),
                                Precision::bf16(WeightStorage::Kahan),
                                Precision::bf16(WeightStorage::Stochastic), Precision::fp32()}) {
    SCOPED_TRACE(detail::concat(precision.name(), " ", to_string(precision.weights)));
    const auto model = fresh_model();
    auto frozen = model->named_parameters()["body.0.weight"];
    frozen.requires_grad_(false);
    MixedPrecision mp(precision, *model, kHere);
    AdamW optimizer(mp.params(), {.lr = 1e-2, .weight_decay = 0});
    const auto step = [&](int number) {
      mp.backward(mp.forward([&] { return batch_loss(*model, number); }));
      const auto grads = mp.inspect_grads();
      EXPECT_TRUE(optimizer.step(grads.unclipped()).stepped());
      mp.advance(grads);
      optimizer.zero_grad();
    };
    const at::Tensor before = frozen.detach().to(at::kFloat).clone();
    for (int i = 0; i < 3; ++i) step(i);
    EXPECT_TRUE(bit_equal(frozen.detach().to(at::kFloat), before));
    const StateDict frozen_state = mp.state_dict(), frozen_optimizer = optimizer.state_dict();

    frozen.requires_grad_(true);
    step(3);
    const Param& param = mp.params()[0];
    ASSERT_EQ(param.name, "body.0.weight");
    // AdamW's first step has the size of the rate, whatever the gradient.
    const at::Tensor moved = (full_precision(param) - before).abs();
    const double allowed = 1e-2 * 1.001 + 0x1p-7 * before.abs().max().item<double>();
    EXPECT_LE(moved.max().item<double>(), allowed);
    EXPECT_GT(moved.mean().item<double>(), 0.8e-2);
    for (int i = 4; i < 8; ++i) step(i);
    const at::Tensor end = full_precision(param);

    // Back to the saved state, frozen then, and on: the same bits.
    mp.load_state_dict(frozen_state);
    optimizer.load_state_dict(frozen_optimizer);
    EXPECT_TRUE(bit_equal(full_precision(param), before));
    for (int i = 3; i < 8; ++i) step(i);
    EXPECT_TRUE(bit_equal(full_precision(param), end));

    // And a state that was saved after thawing goes into objects that were built frozen.
    const StateDict thawed = mp.state_dict(), thawed_optimizer = optimizer.state_dict();
    const auto other = fresh_model();
    other->named_parameters()["body.0.weight"].requires_grad_(false);
    MixedPrecision other_mp(precision, *other, kHere);
    AdamW other_optimizer(other_mp.params(), {.lr = 1e-2, .weight_decay = 0});
    other_mp.load_state_dict(thawed);
    other_optimizer.load_state_dict(thawed_optimizer);
    EXPECT_TRUE(bit_equal(full_precision(other_mp.params()[0]), end));
  }
}

TEST(SkippedStep, PutsRunningStatisticsBack) {
  testing::ConvNet model;
  MixedPrecision mp(Precision::fp16(), model, {.autocast = testing::low_on_any_machine(at::kHalf)});
  AdamW optimizer(mp.params());
  int skipped = 0;
  for (int i = 0; i < 12; ++i) {
    torch::manual_seed(i);
    at::Tensor x = torch::randn({8, 1, 8, 8});
    if (i == 7) x = x * 1e5;  // beyond FP16 in the first convolution
    const at::Tensor mean = model.norm->running_mean.clone(), var = model.norm->running_var.clone();
    const int64_t batches = model.norm->num_batches_tracked.item<int64_t>();
    mp.backward(mp.forward([&] { return model.loss(x, torch::randint(10, {8})); }));
    const auto grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    optimizer.zero_grad();
    skipped += !report.stepped();
    EXPECT_EQ(report.stepped(), !bit_equal(model.norm->running_mean, mean)) << i;
    EXPECT_EQ(report.stepped(), !bit_equal(model.norm->running_var, var)) << i;
    EXPECT_EQ(model.norm->num_batches_tracked.item<int64_t>(), batches + report.stepped()) << i;
  }
  EXPECT_GE(skipped, 1);
  EXPECT_TRUE(model.norm->running_mean.isfinite().all().item<bool>());
  EXPECT_TRUE(model.norm->running_var.isfinite().all().item<bool>());
}

TEST(SkippedStep, PutsBackALargeBufferThatForwardChanges) {
  struct Codebook : torch::nn::Module {
    Codebook() {
      linear = register_module("linear", torch::nn::Linear(4, 4));
      codes = register_buffer("codes", torch::zeros({70000}));
      mask = register_buffer("mask", torch::ones({70000}));
    }
    at::Tensor forward(const at::Tensor& x) {
      codes.add_(x.detach().sum());
      return linear(x * mask[0]).square().mean();
    }
    torch::nn::Linear linear{nullptr};
    at::Tensor codes, mask;
  } model;
  MixedPrecision mp(fp16_from(256), model, kHere);
  AdamW optimizer(mp.params());
  for (const double factor : {1.0, 1e30, 1.0}) {
    const double before = model.codes[0].item<double>();
    mp.backward(mp.forward([&] { return model.forward(torch::ones({2, 4}) * factor); }));
    const auto grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
    EXPECT_EQ(model.codes[0].item<double>(), before + (factor == 1.0 ? 8 : 0));
  }
}

TEST(SkippedStep, LeavesBuffersAloneThatCannotBeWritten) {
  struct Graph : torch::nn::Module {
    Graph() {
      linear = register_module("linear", torch::nn::Linear(4, 4));
      register_buffer("adjacency", torch::eye(300).to_sparse());
      register_buffer("expanded", torch::ones({1, 1}).expand({4, 4}));
    }
    torch::nn::Linear linear{nullptr};
  } model;
  MixedPrecision mp(Precision::bf16(), model, kHere);
  AdamW optimizer(mp.params());
  for (const double factor : {1.0, std::numeric_limits<double>::infinity(), 1.0}) {
    mp.backward(mp.forward([&] { return model.linear(torch::ones({2, 4})).mean() * factor; }));
    const auto grads = mp.inspect_grads();
    EXPECT_EQ(optimizer.step(grads.unclipped()).stepped(), factor == 1.0);
    mp.advance(grads);
    optimizer.zero_grad();
  }
  mp.load_state_dict(mp.state_dict());
}

TEST(MixedPrecisionState, HasTheBuffers) {
  const auto train = [](testing::ConvNet& model, MixedPrecision& mp, AdamW& optimizer, int steps) {
    for (int i = 0; i < steps; ++i) {
      mp.backward(
          mp.forward([&] { return model.loss(torch::randn({8, 1, 8, 8}) + 3, torch::randint(10, {8})); }));
      const auto grads = mp.inspect_grads();
      (void)optimizer.step(grads.unclipped());
      mp.advance(grads);
      optimizer.zero_grad();
    }
  };
  testing::ConvNet model, other;
  MixedPrecision mp(Precision::bf16(), model, kHere), other_mp(Precision::bf16(), other, kHere);
  AdamW optimizer(mp.params());
  train(model, mp, optimizer, 5);
  other_mp.load_state_dict(mp.state_dict());
  for (const auto& item : model.named_buffers())
    EXPECT_TRUE(bit_equal(item.value(), other.named_buffers()[item.key()])) << item.key();
  model.eval();
  other.eval();
  const torch::NoGradGuard no_grad;
  const at::Tensor x = torch::randn({4, 1, 8, 8}), target = torch::randint(10, {4});
  EXPECT_EQ(mp.forward([&] { return model.loss(x, target); }).item<double>(),
            other_mp.forward([&] { return other.loss(x, target); }).item<double>());
}

TEST(MixedPrecisionState, ModuleAndOptimizerWithoutMastersGoOnFromTheModulesWeights) {
  for (const auto& precision : {Precision::bf16(), fp16_from(256), Precision::bf16(WeightStorage::Kahan)}) {
    const auto model = fresh_model(), other = fresh_model();
    MixedPrecision mp(precision, *model, kHere), other_mp(precision, *other, kHere);
    AdamW optimizer(mp.params(), {.lr = 1e-2}), other_optimizer(other_mp.params(), {.lr = 1e-2});
    const auto step = [](Mlp& m, MixedPrecision& p, AdamW& o, int number) {
      const auto loss = p.forward([&] { return batch_loss(m, number); });
      p.backward(loss);
      const auto grads = p.inspect_grads();
      (void)o.step(grads.unclipped());
      p.advance(grads);
      o.zero_grad();
      return loss.item<double>();
    };
    for (int i = 0; i < 30; ++i) (void)step(*model, mp, optimizer, i % 4);
    load_module_state(*other, module_state(*model));
    other_optimizer.load_state_dict(optimizer.state_dict());
    EXPECT_EQ(step(*model, mp, optimizer, 0), step(*other, other_mp, other_optimizer, 0));
    // From masters that differ by half an ulp of the working copy: 2^-8 of each weight in BF16.
    EXPECT_NEAR(step(*model, mp, optimizer, 1), step(*other, other_mp, other_optimizer, 1), 0.02);
  }
}

TEST(WeightRules, KeepNormsInFp32UnderBf16) {
  testing::Transformer model(17, 16, 2, 2);
  auto precision = Precision::bf16();
  precision.keep("*norm*", WeightStorage::Fp32).keep("blocks.1.norm2.bias", WeightStorage::Kahan);
  MixedPrecision mp(precision, model, kHere);
  for (const Param& param : mp.params()) {
    const bool norm = param.name.find("norm") != std::string::npos;
    const bool kahan = param.name == "blocks.1.norm2.bias";
    EXPECT_EQ(param.storage, kahan  ? WeightStorage::Kahan
                             : norm ? WeightStorage::Fp32
                                    : WeightStorage::SplitMaster)
        << param.name;
    EXPECT_EQ(param.working.scalar_type(), norm && !kahan ? at::kFloat : at::kBFloat16) << param.name;
  }
  AdamW optimizer(mp.params(), {.lr = 3e-3});
  double first = 0, last = 0;
  for (int i = 0; i < 20; ++i) {
    torch::manual_seed(i % 2);
    const at::Tensor ids = torch::randint(17, {4, 8});
    const auto loss = mp.forward([&] { return model.loss(ids, ids); });
    mp.backward(loss);
    const auto grads = mp.inspect_grads();
    ASSERT_TRUE(optimizer.step(grads.clipped_to(1.0)).stepped());
    mp.advance(grads);
    optimizer.zero_grad();
    (i == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, 0.5 * first);
}

TEST(WeightRules, ThatFitNoParameterAreRefused) {
  const auto model = fresh_model();
  auto precision = Precision::bf16();
  precision.keep("router.*", WeightStorage::Fp32);
  EXPECT_TRUE(says(error_of([&] { MixedPrecision(precision, *model, kHere); }), "'router.*'"));
  auto fp16 = Precision::fp16();
  fp16.keep("body.*", WeightStorage::SplitMaster);
  EXPECT_TRUE(says(error_of([&] { MixedPrecision(fp16, *model, kHere); }), "the rule for 'body.*'"));
  EXPECT_EQ(Precision::bf16().keep("a*b?", WeightStorage::Fp32).storage_of("a.x.bc"), WeightStorage::Fp32);
  EXPECT_EQ(Precision::bf16().keep("a*b?", WeightStorage::Fp32).storage_of("a.x.b"),
            WeightStorage::SplitMaster);
}

}  // namespace
}  // namespace halfstep
