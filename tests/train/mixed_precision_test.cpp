// The loop of halfstep/mixed_precision.h, in every precision and style.
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/error_of.h"
#include "support/small_models.h"

namespace halfstep {
namespace mixed_precision_test {

using testing::bit_equal;
using testing::error_of;
using testing::kAnyMachine;
using testing::Mlp;

const MixedPrecisionOptions kHere{.autocast = kAnyMachine};

struct Batch {
  at::Tensor x, target;
};

Batch batch_of(int seed) {
  torch::manual_seed(seed);
  return {torch::randn({32, 20}), torch::randint(10, {32})};
}

std::shared_ptr<Mlp> fresh_model() {
  torch::manual_seed(1);
  return std::make_shared<Mlp>(20, 40, 10);
}

/// The loss before each step.
std::vector<double> train(const Precision& precision, int steps) {
  const auto model = fresh_model();
  MixedPrecision mp(precision, *model, kHere);
  AdamW optimizer(mp.params(), {.lr = 3e-3});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto [x, target] = batch_of(100 + step % 4);
    const auto loss = mp.forward([&] { return model->loss(x, target); });
    mp.backward(loss);
    const auto grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    optimizer.zero_grad();
    if (report.stepped()) losses.push_back(loss.item<double>());
  }
  return losses;
}

TEST(MixedPrecision, Fp32LoopIsTorchsOwnLoop) {
  const auto model = fresh_model();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(1e-2));
  std::vector<double> expected;
  for (int step = 0; step < 20; ++step) {
    const auto [x, target] = batch_of(100 + step % 4);
    optimizer.zero_grad();
    const auto loss = model->loss(x, target);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    expected.push_back(loss.item<double>());
  }
  const auto losses = train(Precision::fp32(), 20);
  ASSERT_EQ(losses.size(), expected.size());
  // The same mathematics in another order of FP32 operations: 20 steps of a loss of about 2 that each start
  // from weights a few 2^-24 apart.
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5) << i;
}

TEST(MixedPrecision, EveryPrecisionAndStorageLearnsAsFp32Does) {
  const auto reference = train(Precision::fp32(), 60);
  const double learned = reference.front() - reference.back();
  ASSERT_GT(learned, 0.5);
  const std::pair<const char*, Precision> precisions[] = {
      {"tf32", Precision::tf32()},
      {"bf16 split", Precision::bf16()},
      {"bf16 master", Precision::bf16(WeightStorage::Fp32Master)},
      {"bf16 autocast", Precision::bf16(WeightStorage::Fp32)},
      {"bf16 kahan", Precision::bf16(WeightStorage::Kahan)},
      {"bf16 stochastic", Precision::bf16(WeightStorage::Stochastic)},
      {"fp16 master", Precision::fp16()},
      {"fp16 autocast", Precision::fp16(WeightStorage::Fp32)},
      {"fp16 kahan", Precision::fp16(WeightStorage::Kahan)},
  };
  for (const auto& [name, precision] : precisions) {
    const auto losses = train(precision, 60);
    // A twentieth of what was learned: BF16's 2^-8 in 60 steps of a small model; a scheme that is wrong is
    // far outside.
    EXPECT_NEAR(losses.back(), reference.back(), 0.05 * learned) << name;
  }
}

TEST(MixedPrecision, SplitMasterTrainsLikeTheFp32MasterItIs) {
  // Working copies differ only where the master is exactly between two BF16 numbers.
  const auto split = train(Precision::bf16(), 30),
             master = train(Precision::bf16(WeightStorage::Fp32Master), 30);
  EXPECT_NEAR(split.back(), master.back(), 1e-3);
}

TEST(MixedPrecision, MastersAreTakenBeforeTheModelIsRounded) {
  for (const auto& precision :
       {Precision::bf16(), Precision::bf16(WeightStorage::Fp32Master), Precision::fp16()}) {
    const auto model = fresh_model();
    std::vector<at::Tensor> originals;
    for (const auto& p : model->parameters()) originals.push_back(p.detach().clone());
    const auto parameters = model->parameters();
    MixedPrecision mp(precision, *model, kHere);
    ASSERT_EQ(mp.params().size(), originals.size());
    for (size_t i = 0; i < originals.size(); ++i) {
      EXPECT_TRUE(bit_equal(full_precision(mp.params()[i]), originals[i]));
      EXPECT_EQ(parameters[i].scalar_type(), precision.compute);  // the model's own tensor, not another
      EXPECT_TRUE(parameters[i].requires_grad());
    }
  }
}

TEST(MixedPrecision, BuffersKeepTheirTypes) {
  testing::ConvNet model;
  MixedPrecision mp(Precision::bf16(), model, kHere);
  EXPECT_EQ(model.norm->running_mean.scalar_type(), at::kFloat);
  EXPECT_EQ(model.norm->num_batches_tracked.scalar_type(), at::kLong);
  const auto loss =
      mp.forward([&] { return model.loss(torch::randn({4, 1, 8, 8}), torch::randint(10, {4})); });
  mp.backward(loss);
  EXPECT_TRUE(mp.inspect_grads().finite());
}

TEST(MixedPrecision, TiedParameterIsOneParameter) {
  struct Tied : torch::nn::Module {
    Tied() {
      embedding = register_parameter("embedding", torch::randn({8, 8}));
      head = register_parameter("head", embedding);
    }
    at::Tensor embedding, head;
  } model;
  ASSERT_EQ(model.parameters().size(), 2u);
  MixedPrecision mp(Precision::bf16(), model, kHere);
  ASSERT_EQ(mp.params().size(), 1u);
  EXPECT_EQ(mp.params()[0].name, "embedding");
  EXPECT_EQ(model.head.scalar_type(), at::kBFloat16);
}

TEST(MixedPrecision, Fp16OverflowSkipsTheStepLowersTheScaleAndNamesTheParameter) {
  const auto model = fresh_model();
  auto precision = Precision::fp16();
  precision.loss_scaling->initial = 0x1p24;  // times a gradient of about 0.01: beyond FP16
  MixedPrecision mp(precision, *model, kHere);
  AdamW optimizer(mp.params());
  const auto before = mp.state_dict();
  const auto [x, target] = batch_of(5);
  mp.backward(mp.forward([&] { return model->loss(x, target); }));
  const auto grads = mp.inspect_grads(GradDetail::PerParam);
  EXPECT_FALSE(grads.finite());
  const auto report = optimizer.step(grads.clipped_to(1.0));
  EXPECT_EQ(report.outcome(), StepOutcome::SkippedNonFinite);
  EXPECT_EQ(report.parameter(), grads.first_bad());
  EXPECT_NE(report.sentence().find("body.0.weight"), std::string::npos) << report.sentence();
  mp.advance(grads);
  EXPECT_EQ(mp.loss_scale(), 0x1p23);
  EXPECT_EQ(mp.loss_scale_state().total_skips, 1);
  for (const Param& param : mp.params())
    EXPECT_TRUE(bit_equal(param.working, before.tensor("working." + param.name)));
}

TEST(MixedPrecision, ScaledLossOfOneElementDoesNotOverflowWhateverItsShape) {
  torch::nn::Linear model(1, 1);
  auto precision = Precision::fp16();
  precision.loss_scaling->initial = 0x1p15;
  MixedPrecision mp(precision, *model, kHere);
  const auto loss = mp.forward([&] { return model->forward(torch::ones({1, 1})) * 0 + 4.0; });
  ASSERT_EQ(loss.scalar_type(), at::kHalf);
  EXPECT_EQ(loss.dim(), 2);
  mp.backward(loss);  // 4 * 2^15 is Inf in FP16
  EXPECT_TRUE(mp.inspect_grads().finite());
}

TEST(MixedPrecision, RunThatOnlySkipsIsAnErrorInEveryPrecision) {
  for (const auto& precision : {Precision::fp32(), Precision::bf16(), Precision::fp16()}) {
    const auto model = fresh_model();
    MixedPrecision mp(precision, *model, kHere);
    SGD optimizer(mp.params(), {.lr = 1e-3});
    const auto skip = [&] {
      const at::Tensor x = torch::full({1, 20}, INFINITY);
      mp.backward(mp.forward([&] { return model->loss(x, torch::zeros({1}, at::kLong)); }));
      const auto grads = mp.inspect_grads();
      (void)optimizer.step(grads.unclipped());
      optimizer.zero_grad();
      mp.advance(grads);
    };
    for (int i = 0; i < 99; ++i) skip();
    EXPECT_THROW(skip(), SkipLimitError) << precision.name();
    EXPECT_EQ(mp.loss_scale_state().total_skips, 100);
    if (!precision.loss_scaling) {
      EXPECT_EQ(mp.loss_scale(), 1.0);
    }
  }
}

TEST(MixedPrecision, ParametersThatShareMemoryAreRefusedBeforeTheyAreParted) {
  struct Shared : torch::nn::Module {
    Shared() {
      embedding = register_parameter("embedding", torch::randn({8, 8}));
      head = register_parameter("head", embedding.detach());
    }
    at::Tensor embedding, head;
  } model;
  for (const auto& precision : {Precision::bf16(), Precision::fp32()})
    EXPECT_NE(error_of([&] { MixedPrecision(precision, model, kHere); }).find("share memory"),
              std::string::npos);
  EXPECT_EQ(model.head.scalar_type(), at::kFloat);
}

TEST(MixedPrecision, AdvanceTakesTheSummaryOfThisStepOnly) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::fp16(), *model, kHere);
  const auto [x, target] = batch_of(5);
  mp.backward(mp.forward([&] { return model->loss(x, target); }));
  const auto found = mp.inspect_grads();
  const GradSummary grads({.finite = false, .any = true, .loss_scale = found.loss_scale()});
  mp.advance(grads);
  EXPECT_NE(error_of([&] { mp.advance(grads); }).find("once per step"), std::string::npos);
}

TEST(MixedPrecision, NormIsUnscaledAndJointOverAllParameters) {
  for (const auto& precision : {Precision::fp32(), Precision::fp16(WeightStorage::Fp32)}) {
    const auto model = fresh_model();
    MixedPrecision mp(precision, *model, kHere);
    const auto [x, target] = batch_of(5);
    mp.backward(mp.forward([&] { return model->loss(x, target); }));
    const auto grads = mp.inspect_grads(GradDetail::PerParam);
    double expected = 0;
    for (const auto& p : model->parameters())
      expected += (p.grad().to(at::kDouble) / mp.loss_scale()).square().sum().item<double>();
    // Sums of fewer than 10^4 squares in FP64, in two orders.
    EXPECT_NEAR(grads.norm(), std::sqrt(expected), 1e-12 * std::sqrt(expected));
    ASSERT_EQ(grads.params().size(), model->parameters().size());
    EXPECT_EQ(grads.params()[0].name, "body.0.weight");
    EXPECT_NEAR(grads.params()[0].norm,
                model->parameters()[0].grad().to(at::kDouble).norm().item<double>() / mp.loss_scale(), 1e-12);
  }
}

TEST(MixedPrecision, ModelThatIsRefusedIsLeftAsItWas) {
  const auto model = fresh_model();
  {
    torch::NoGradGuard no_grad;
    model->parameters().back()[0] = NAN;
  }
  EXPECT_NE(
      error_of([&] { MixedPrecision(Precision::bf16(), *model, kHere); }).find("'body.4.bias' holds an Inf"),
      std::string::npos);
  for (const auto& p : model->parameters()) EXPECT_EQ(p.scalar_type(), at::kFloat);
}

TEST(MixedPrecision, WhatDoesNotGoTogetherIsRefused) {
  const auto model = fresh_model();
  const auto refused = [&](const char* what, const Precision& precision) {
    const auto message = error_of([&] { MixedPrecision(precision, *model, kHere); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  refused("split master", Precision::fp16(WeightStorage::SplitMaster));
  refused("compute is Float, but weights", {.weights = WeightStorage::Kahan});
  refused("compute is Double", {.compute = at::kDouble});
  refused("float32_products is for FP32", {.compute = at::kHalf, .float32_products = Float32Products::Tf32});
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  EXPECT_NE(error_of([&] { MixedPrecision(Precision::bf16(), *model, kHere); }).find("expected Float"),
            std::string::npos);
  EXPECT_NE(error_of([&] { mp.backward(torch::ones({3})); }).find("a loss of one element"),
            std::string::npos);
}

TEST(MixedPrecision, SecondBackwardWithoutAccumulationIsRefusedWhereItWouldRound) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, kHere);
  const auto [x, target] = batch_of(5);
  const auto once = [&] { mp.backward(mp.forward([&] { return model->loss(x, target); })); };
  once();
  EXPECT_NE(error_of(once).find("'body.0.weight' still has a gradient"), std::string::npos);
  const auto fp32_model = fresh_model();
  MixedPrecision fp32(Precision::bf16(WeightStorage::Fp32), *fp32_model, kHere);
  for (int i = 0; i < 2; ++i)
    fp32.backward(fp32.forward([&] { return fp32_model->loss(x, target); }));  // FP32 sums
}

TEST(MixedPrecision, ForwardReturnsWhatTheFunctionReturnsAndEndsItsScope) {
  const auto model = fresh_model();
  const MixedPrecision mp(Precision::bf16(), *model, kHere);
  const auto [a, b] =
      mp.forward([] { return std::pair(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})), 7); });
  EXPECT_EQ(a.scalar_type(), at::kBFloat16);
  EXPECT_EQ(b, 7);
  EXPECT_EQ(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(), at::kFloat);
  EXPECT_THROW(mp.forward([]() -> int { throw std::runtime_error("x"); }), std::runtime_error);
  EXPECT_EQ(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(), at::kFloat);
}

}  // namespace mixed_precision_test
}  // namespace halfstep
