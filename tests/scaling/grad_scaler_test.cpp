#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "support/error_of.h"

namespace halfstep {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

torch::Tensor parameter(std::vector<float> values, at::ScalarType type = at::kFloat) {
  return torch::tensor(values).to(type).requires_grad_();
}

void set_grad(torch::Tensor& param, std::vector<float> values) {
  param.mutable_grad() = torch::tensor(values).to(param.scalar_type());
}

torch::optim::SGD sgd(std::vector<torch::Tensor> params) {
  return torch::optim::SGD(std::move(params), torch::optim::SGDOptions(1.0));
}

TEST(GradScaler, ScaledLossGivesTheSameStepAsTheUnscaledOne) {
  auto with = parameter({1, -2, 3}), without = parameter({1, -2, 3});
  auto optimizer_with = sgd({with}), optimizer_without = sgd({without});
  GradScaler scaler;
  scaler.scale((with * with).sum()).backward();
  (without * without).sum().backward();
  EXPECT_TRUE(scaler.step(optimizer_with).stepped());
  optimizer_without.step();
  EXPECT_TRUE(torch::equal(with, without));  // powers of two: exact
}

TEST(GradScaler, PassesEverythingThroughWhereItIsNotEnabled) {
  auto with = parameter({1, -2, 3}), without = parameter({1, -2, 3});
  auto optimizer_with = sgd({with}), optimizer_without = sgd({without});
  GradScaler scaler({}, {.enabled = false});
  EXPECT_FALSE(scaler.is_enabled());
  const auto loss = (with * with).sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  (without * without).sum().backward();
  scaler.unscale_(optimizer_with);
  EXPECT_TRUE(scaler.step(optimizer_with).stepped());
  scaler.update();
  optimizer_without.step();
  EXPECT_TRUE(torch::equal(with, without));
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_EQ(scaler.state_dict().size(), 0u);
  scaler.load_state_dict(GradScaler().state_dict());
  EXPECT_EQ(scaler.get_scale(), 1.0);
}

TEST(GradScaler, ScaleKeepsTheTypeOfItsArgumentAndTakesSeveral) {
  GradScaler scaler;
  const auto scaled = scaler.scale({torch::ones({2}, at::kHalf) * 0.5, torch::ones({1}, at::kDouble)});
  EXPECT_EQ(scaled[0].scalar_type(), at::kHalf);
  EXPECT_EQ(scaled[0][0].item<float>(), 0x1p15);
  EXPECT_EQ(scaled[1].scalar_type(), at::kDouble);
  EXPECT_EQ(scaled[1].item<double>(), 0x1p16);
}

// 3 x 2^16 is beyond FP16, so a loss of zero dimensions becomes FP32, as torch.amp's does.
TEST(GradScaler, AnFp16LossDoesNotOverflowWhenScaled) {
  auto p = torch::full({}, 3.0).to(at::kHalf).requires_grad_();
  GradScaler scaler;
  const auto scaled = scaler.scale(p * 1.0);
  EXPECT_EQ(scaled.scalar_type(), at::kFloat);
  EXPECT_EQ(scaled.item<float>(), 3 * 0x1p16);
}

TEST(GradScaler, ASkippedStepNamesItsParameterAndLeavesEverythingElseAlone) {
  torch::nn::Sequential model(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  torch::optim::Adam optimizer(model->parameters());
  GradScaler scaler;
  scaler.name_parameters(*model);
  for (auto& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
  model->parameters()[2].mutable_grad()[1][2] = kNan;
  const auto before = model->parameters()[0].clone();

  const auto report = scaler.step(optimizer);
  EXPECT_EQ(report.outcome(), StepOutcome::SkippedNonFinite);
  EXPECT_EQ(report.parameter(), "1.weight");
  EXPECT_EQ(report.loss_scale(), 0x1p16);
  EXPECT_EQ(report.sentence(), "skipped: the gradient of 1.weight is not finite at loss scale 65536");
  EXPECT_TRUE(torch::equal(before, model->parameters()[0]));
  EXPECT_TRUE(optimizer.state().empty());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 0x1p15);
}

TEST(GradScaler, WithoutNamesAParameterIsToldByItsPlaceAndShape) {
  auto a = parameter({1}), b = parameter({1, 2});
  auto optimizer = sgd({a, b});
  set_grad(a, {1});
  set_grad(b, {1, kInf});
  GradScaler scaler;
  EXPECT_EQ(scaler.step(optimizer).parameter(), "parameter 1 (group 0, shape [2])");
}

TEST(GradScaler, NoGradientsAtAllIsADefinedNoOpAndTheNextStepWorks) {
  auto p = parameter({1});
  auto optimizer = sgd({p});
  GradScaler scaler({.growth_interval = 1});
  EXPECT_EQ(scaler.step(optimizer).outcome(), StepOutcome::SkippedNoGradients);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 0x1p16) << "neither a clean step nor a skipped one";
  set_grad(p, {0x1p16});
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 0x1p17);
  EXPECT_EQ(p.item<float>(), 0);
}

TEST(GradScaler, CallsInTheWrongOrderAreErrorsThatLeaveTheNextLegalCallWorking) {
  auto p = parameter({1});
  auto optimizer = sgd({p});
  set_grad(p, {0x1p16});
  GradScaler scaler;
  EXPECT_NE(testing::error_of([&] { scaler.update(); }).find("update without a step"), std::string::npos);
  scaler.unscale_(optimizer);
  EXPECT_NE(testing::error_of([&] { scaler.unscale_(optimizer); }).find("already called"), std::string::npos);
  EXPECT_EQ(p.grad().item<float>(), 1) << "un-scaled once, not twice";
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  EXPECT_NE(testing::error_of([&] { (void)scaler.step(optimizer); }).find("already called"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] { scaler.unscale_(optimizer); }).find("after step"), std::string::npos);
  EXPECT_EQ(p.item<float>(), 0) << "stepped once";
  scaler.update();
  EXPECT_TRUE(scaler.step(optimizer).stepped());
}

TEST(GradScaler, ManySkipsInARowBecomeAnErrorThatNamesTheParameter) {
  auto good = parameter({1}), bad = parameter({1});
  auto optimizer = sgd({good, bad});
  GradScaler scaler({.max_consecutive_skips = 3});
  for (int skip = 1; skip <= 3; ++skip) {
    set_grad(good, {1});
    set_grad(bad, {kInf});
    EXPECT_FALSE(scaler.step(optimizer).stepped());
    if (skip < 3) {
      EXPECT_NO_THROW(scaler.update());
      continue;
    }
    try {
      scaler.update();
      FAIL() << "no error at the limit";
    } catch (const SkipLimitError& error) {
      EXPECT_EQ(error.parameter, "parameter 1 (group 0, shape [1])");
      EXPECT_NE(std::string(error.what()).find("3 steps in a row"), std::string::npos) << error.what();
    }
  }
  // Caught: the state has moved on, and a clean step ends the row.
  set_grad(bad, {1});
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  EXPECT_NO_THROW(scaler.update());
  EXPECT_EQ(scaler.state().consecutive_skips, 0);
}

TEST(GradScaler, TenThousandOverflowsInARowThenACleanStepLeaveFiniteParameters) {
  auto p = parameter({1, 2});
  auto optimizer = sgd({p});
  GradScaler scaler({.max_consecutive_skips = 0});
  for (int step = 0; step < 10'000; ++step) {
    set_grad(p, {1, step % 3 == 0 ? kNan : kInf});
    ASSERT_FALSE(scaler.step(optimizer).stepped());
    scaler.update();
    ASSERT_TRUE(std::isfinite(scaler.get_scale()) && scaler.get_scale() > 0) << step;
  }
  const float scaled_grad = static_cast<float>(0.25 * scaler.get_scale());
  set_grad(p, {scaled_grad, scaled_grad});
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  EXPECT_TRUE(torch::equal(p, torch::tensor({0.75f, 1.75f})));
}

// Half the way between two updates: optimizer A overflows, B does not.
TEST(GradScaler, OneOfTwoOptimizersSkippingLowersTheSharedScale) {
  auto a = parameter({1}), b = parameter({1});
  auto optimizer_a = sgd({a}), optimizer_b = sgd({b});
  set_grad(a, {kInf});
  set_grad(b, {0x1p16});
  GradScaler scaler;
  EXPECT_FALSE(scaler.step(optimizer_a).stepped());
  EXPECT_TRUE(scaler.step(optimizer_b).stepped());
  scaler.update();
  EXPECT_EQ(a.item<float>(), 1);
  EXPECT_EQ(b.item<float>(), 0);
  EXPECT_EQ(scaler.get_scale(), 0x1p15);
}

TEST(GradScaler, AnOptimizerThatWasOnlyUnscaledCountsInTheUpdate) {
  auto p = parameter({1});
  auto optimizer = sgd({p});
  set_grad(p, {kInf});
  GradScaler scaler;
  scaler.unscale_(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 0x1p15);
}

TEST(GradScaler, AParameterOfTwoOptimizersIsUnscaledOnce) {
  auto p = parameter({1});
  auto first = sgd({p}), second = sgd({p});
  set_grad(p, {0x1p14});
  GradScaler scaler;
  EXPECT_TRUE(scaler.step(first).stepped());
  EXPECT_TRUE(scaler.step(second).stepped());
  EXPECT_EQ(p.item<float>(), 1 - 0.25 - 0.25);
}

TEST(GradScaler, AGradientThatTwoParametersShareIsUnscaledOnce) {
  auto a = parameter({1}), b = parameter({1});
  auto optimizer = sgd({a, b});
  set_grad(a, {0x1p14});
  b.mutable_grad() = a.grad();
  GradScaler scaler;
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  EXPECT_EQ(a.item<float>(), 0.75);
  EXPECT_EQ(b.item<float>(), 0.75);
}

// The first optimizer's gradient is freed, and the second's is made at the same address, as malloc likes to
// do.
TEST(GradScaler, AGradientMadeWhereAnotherWasFreedIsUnscaledToo) {
  auto a = parameter({1}), b = parameter({1});
  auto optimizer_a = sgd({a}), optimizer_b = sgd({b});
  GradScaler scaler;
  for (int round = 0; round < 100; ++round) {
    b.data().fill_(1);
    a.mutable_grad() = at::empty({1}).fill_(0);
    EXPECT_TRUE(scaler.step(optimizer_a).stepped());
    a.mutable_grad().reset();
    b.mutable_grad() = at::empty({1}).fill_(0x1p14);
    EXPECT_TRUE(scaler.step(optimizer_b).stepped());
    ASSERT_EQ(b.item<float>(), 0.75) << "round " << round;
    scaler.update(0x1p16);
  }
}

// Written to between two un-scalings, a shared gradient may or may not carry the loss scale: nobody can tell.
TEST(GradScaler, ASharedGradientThatWasRewrittenBetweenTwoOptimizersIsRefusedByName) {
  auto p = parameter({1});
  auto first = sgd({p}), second = sgd({p});
  set_grad(p, {0x1p14});
  GradScaler scaler;
  EXPECT_TRUE(scaler.step(first).stepped());
  first.zero_grad(/*set_to_none=*/false);
  p.mutable_grad().add_(0x1p14);
  EXPECT_NE(testing::error_of([&] { (void)scaler.step(second); }).find("parameter 0 (group 0, shape [1])"),
            std::string::npos);
  EXPECT_EQ(p.item<float>(), 0.75) << "not stepped";
}

TEST(GradScaler, UnscalingBeforeThereAreGradientsDoesNotHideThemFromTheStep) {
  auto p = parameter({1});
  auto optimizer = sgd({p});
  GradScaler scaler;
  scaler.unscale_(optimizer);
  set_grad(p, {0x1p14});
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  EXPECT_EQ(p.item<float>(), 0.75);
}

TEST(GradScaler, GradientsSpoiledAfterUnscaleAreFoundAtTheStep) {
  auto p = parameter({1});
  auto optimizer = sgd({p});
  set_grad(p, {1});
  GradScaler scaler;
  scaler.unscale_(optimizer);
  p.mutable_grad().div_(0);
  EXPECT_EQ(scaler.step(optimizer).outcome(), StepOutcome::SkippedNonFinite);
  EXPECT_EQ(p.item<float>(), 1);
}

TEST(GradScaler, OverflowInTheDivisionItselfIsFound) {
  auto p = parameter({1});
  auto optimizer = sgd({p});
  GradScaler scaler({.initial = 0x1p-20});
  set_grad(p, {0x1p120});  // finite, but 2^140 once divided by 2^-20
  EXPECT_EQ(scaler.step(optimizer).outcome(), StepOutcome::SkippedNonFinite);
}

// True gradients 2^-18 ... 2^-30, scaled by 2^16 into FP16's range. Divided in FP16 they would fall below
// 2^-24 again, where FP16 ends.
TEST(GradScaler, SmallFp16GradientsSurviveUnscaling) {
  auto p = parameter(std::vector<float>(13, 0.0f), at::kHalf);
  auto optimizer = sgd({p});
  std::vector<float> scaled;
  for (int exponent = 18; exponent <= 30; ++exponent) scaled.push_back(std::ldexp(1.0f, 16 - exponent));
  set_grad(p, scaled);
  GradScaler scaler;
  scaler.unscale_(optimizer);
  EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
  for (int exponent = 18; exponent <= 30; ++exponent)
    EXPECT_EQ(p.grad()[exponent - 18].item<float>(), std::ldexp(1.0f, -exponent));
  EXPECT_TRUE(scaler.step(optimizer).stepped());
}

TEST(GradScaler, Fp16ParametersStepUnderEveryOptimizerThatNeedsNoClosure) {
  auto step_with = [](auto make_optimizer) {
    auto p = parameter({1, 2}, at::kHalf);
    auto optimizer = make_optimizer(std::vector<torch::Tensor>{p});
    GradScaler scaler;
    for (int step = 0; step < 3; ++step) {
      scaler.scale((p.to(at::kFloat) * p.to(at::kFloat)).sum() * 1e-3).backward();
      EXPECT_TRUE(scaler.step(optimizer).stepped());
      scaler.update();
      optimizer.zero_grad();
    }
    EXPECT_EQ(p.scalar_type(), at::kHalf);
    EXPECT_TRUE(torch::isfinite(p).all().item<bool>());
    EXPECT_FALSE(torch::equal(p.detach(), torch::tensor({1.0f, 2.0f}).to(at::kHalf)));
  };
  namespace optim = torch::optim;
  step_with([](auto p) { return optim::SGD(p, optim::SGDOptions(0.5).momentum(0.9)); });
  step_with([](auto p) { return optim::Adam(p, optim::AdamOptions(0.01).eps(1e-4)); });
  step_with([](auto p) { return optim::AdamW(p, optim::AdamWOptions(0.01).eps(1e-4)); });
  step_with([](auto p) { return optim::RMSprop(p, optim::RMSpropOptions(0.01).eps(1e-4)); });
  step_with([](auto p) { return optim::Adagrad(p, optim::AdagradOptions(0.01).eps(1e-4)); });
}

TEST(GradScaler, SparseFp16RowsThatOverflowWhenSummedInFp16AreRight) {
  auto p = torch::zeros({4, 1}, at::kHalf).requires_grad_();
  const auto rows = torch::tensor({{1, 1}});
  p.mutable_grad() = torch::sparse_coo_tensor(rows, torch::full({2, 1}, 64000.0).to(at::kHalf), {4, 1});
  auto optimizer = sgd({p});
  GradScaler scaler({.initial = 0x1p7});
  scaler.unscale_(optimizer);
  EXPECT_EQ(p.grad().coalesce().values().item<float>(), 1000.0f);  // 128000 / 2^7
}

TEST(GradScaler, SparseGradientsAreUnscaledAndChecked) {
  for (const float second : {0x1p16f, kInf}) {
    auto p = torch::zeros({4}).requires_grad_();
    p.mutable_grad() =
        torch::sparse_coo_tensor(torch::tensor({{1, 3}}), torch::tensor({0x1p17f, second}), {4});
    auto optimizer = sgd({p});
    GradScaler scaler;
    EXPECT_EQ(scaler.step(optimizer).stepped(), std::isfinite(second));
    EXPECT_TRUE(
        torch::equal(p, std::isfinite(second) ? torch::tensor({0.f, -2.f, 0.f, -1.f}) : torch::zeros({4})));
  }
}

TEST(GradScaler, SparseRowsThatOverflowWhenSummedAreFoundAndNamed) {
  auto p = torch::zeros({4}).requires_grad_();
  p.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1, 1}}), torch::tensor({3e38f, 3e38f}), {4});
  auto optimizer = sgd({p});
  GradScaler scaler({.initial = 1});
  EXPECT_EQ(scaler.step(optimizer).parameter(), "parameter 0 (group 0, shape [4])");
  EXPECT_TRUE(torch::equal(p, torch::zeros({4})));
}

TEST(GradScaler, ExpandedAndStridedGradientsGiveTheContiguousResult) {
  auto expanded = torch::zeros({3}).requires_grad_(), strided = torch::zeros({3}).requires_grad_();
  expanded.mutable_grad() = torch::full({1}, 0x1p16f).expand({3});
  strided.mutable_grad() = torch::arange(6).to(at::kFloat).mul(0x1p16).slice(0, 0, 6, 2);
  auto optimizer = sgd({expanded, strided});
  GradScaler scaler;
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  EXPECT_TRUE(torch::equal(expanded, torch::full({3}, -1.0f)));
  EXPECT_TRUE(torch::equal(strided, torch::tensor({0.f, -2.f, -4.f})));
}

TEST(GradScaler, TypesThatCannotBeUnscaledAreRefusedByName) {
  auto p = torch::zeros({2}).requires_grad_();
  p.mutable_grad() = torch::zeros({2}).to(at::kFloat8_e4m3fn);
  auto optimizer = sgd({p});
  GradScaler scaler;
  EXPECT_NE(testing::error_of([&] { scaler.unscale_(optimizer); }).find("Float8_e4m3fn"), std::string::npos);

  auto q = torch::zeros({2, 2}).requires_grad_();
  q.mutable_grad() = torch::eye(2).to_sparse_csr();
  auto other = sgd({q});
  EXPECT_NE(testing::error_of([&] { scaler.unscale_(other); }).find("SparseCsr"), std::string::npos);
}

TEST(GradScaler, SettingTheScaleByHandIsBoundedAsWell) {
  GradScaler scaler;
  scaler.update(1024.0);
  EXPECT_EQ(scaler.get_scale(), 1024.0);
  for (const double bad : {0.0, -1.0, double(kNan), double(kInf), 0x1p127, 0x1p-25})
    EXPECT_NE(testing::error_of([&] { scaler.update(bad); }).find("not between"), std::string::npos) << bad;
  EXPECT_EQ(scaler.get_scale(), 1024.0);
}

TEST(GradScaler, ResumedRunFollowsTheSameScaleAsTheUninterruptedOne) {
  const LossScaling options{.growth_interval = 3, .hysteresis = 2, .max_consecutive_skips = 0};
  auto run = [&](int restart_at) {
    auto p = parameter({0});
    auto optimizer = sgd({p});
    GradScaler scaler(options);
    std::vector<LossScaleState> path;
    for (int step = 0; step < 60; ++step) {
      if (step == restart_at) {
        const auto saved = scaler.state_dict();
        scaler = GradScaler();  // other options, fresh state: all of it must come from the file
        scaler.load_state_dict(saved);
      }
      set_grad(p, {step % 11 == 4 || step % 7 == 5 ? kInf : 1.0f});
      (void)scaler.step(optimizer);
      scaler.update();
      path.push_back(scaler.state());
    }
    return path;
  };
  const auto uninterrupted = run(-1);
  for (int restart_at = 0; restart_at < 60; ++restart_at)
    EXPECT_EQ(run(restart_at), uninterrupted) << restart_at;
}

TEST(GradScaler, AScalerAtABoundThatFp32DoesNotHoldLoadsItsOwnState) {
  auto p = parameter({0});
  auto optimizer = sgd({p});
  GradScaler scaler({.floor = 1e-4, .max_consecutive_skips = 0});
  for (int step = 0; step < 100; ++step) {
    set_grad(p, {kInf});
    (void)scaler.step(optimizer);
    scaler.update();
  }
  GradScaler other;
  other.load_state_dict(scaler.state_dict());
  EXPECT_EQ(other.state(), scaler.state());
}

TEST(GradScaler, StatesThatNoScalerSavedAreRefused) {
  const auto good = GradScaler().state_dict();
  auto refuse = [&](const char* name, StateDict::Value value, const char* expected) {
    auto bad = good;
    bad.set(name, std::move(value));
    GradScaler scaler({.initial = 8});
    EXPECT_NE(testing::error_of([&] { scaler.load_state_dict(bad); }).find(expected), std::string::npos)
        << name;
    EXPECT_EQ(scaler.get_scale(), 8) << "a refused state changes nothing";
  };
  refuse("scale", double(kNan), "'scale' is nan");
  refuse("scale", 0.0, "'scale' is 0");
  refuse("scale", 0.1, "FP32");
  refuse("scale", int64_t{65536}, "expected a real number");
  refuse("_growth_tracker", int64_t{-1}, "'_growth_tracker' is -1");
  refuse("growth_interval", int64_t{0}, "growth_interval");
  refuse("surprise", 1.0, "Unknown: 'surprise'");
  EXPECT_NE(testing::error_of([] { GradScaler().load_state_dict({}); }).find("Missing: 'scale'"),
            std::string::npos);
}

// A host read of a device value is aten::_local_scalar_dense; on an accelerator it waits for the device. The
// code is the same for every device, so counting on CPU counts for all.
TEST(GradScaler, OnlyStepReadsFromTheDeviceAndOnlyOneFlag) {
  static thread_local int host_reads = 0;
  const auto counting = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(call.name()) == "aten::_local_scalar_dense") ++host_reads;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  auto reads_in = [](auto call) {
    host_reads = 0;
    call();
    return host_reads;
  };

  auto p = parameter({1}), q = parameter({1}, at::kHalf);
  auto optimizer = sgd({p, q});
  set_grad(p, {1});
  set_grad(q, {1});
  GradScaler scaler;
  EXPECT_EQ(reads_in([&] { (void)p.sum().item<float>(); }), 1) << "the counter counts";
  EXPECT_EQ(reads_in([&] { (void)scaler.scale(p.sum()); }), 0);
  EXPECT_EQ(reads_in([&] { scaler.unscale_(optimizer); }), 0);
  EXPECT_EQ(reads_in([&] { (void)clip_grad_norm_({p, q}, 1.0); }), 0);
  EXPECT_EQ(reads_in([&] { EXPECT_TRUE(scaler.step(optimizer).stepped()); }), 1);
  EXPECT_EQ(reads_in([&] { scaler.update(); }), 0);
  at::removeCallback(counting);
}

}  // namespace
}  // namespace halfstep
