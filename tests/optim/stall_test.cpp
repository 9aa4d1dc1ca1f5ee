// What masters are for: many updates that are each too small for the working copy.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cstdio>

#include "support/error_of.h"

namespace halfstep {
namespace {

constexpr int kUpdates = 1000;
constexpr int64_t kWeights = 4096;  // so that stochastic rounding has an average

struct Outcome {
  double error = 0;           // of the mean weight, from 1 + 1000 updates in exact arithmetic
  double lost = 0, held = 0;  // fractions over all updates, by the stall meter
};

Outcome run(WeightStorage storage, double update) {
  const Param param = make_param("w", torch::ones({kWeights}), storage, at::kBFloat16);
  SGD optimizer({param}, {.lr = 1.0});
  const auto grad = torch::full({kWeights}, -static_cast<float>(update));
  Outcome outcome;
  UpdateStall all;
  for (int i = 0; i < kUpdates; ++i) {
    param.working.mutable_grad() = grad;
    const auto stall = optimizer.step({}, {.stalls = true}).stall();
    all.updates += stall.updates;
    all.held += stall.held;
    all.lost += stall.lost;
  }
  EXPECT_EQ(all.updates, kUpdates * kWeights);
  const double exact = 1.0 + kUpdates * static_cast<double>(static_cast<float>(update));
  outcome.error = std::abs(full_precision(param).to(at::kDouble).mean().item<double>() - exact);
  outcome.lost = all.lost_fraction();
  outcome.held = all.held_fraction();
  return outcome;
}

TEST(Masters, KeepUpdatesThatPureBf16LosesAndTheMeterSaysSo) {
  std::printf("Error after 1,000 updates of 1e-3 * 2^-k from 1.0 (stall meter: share of updates lost)\n");
  std::printf(
      "| k | exact change | FP32 master | split master | Kahan | stochastic | pure BF16 | lost by pure BF16 "
      "| lost by Kahan |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|\n");
  for (int k = 0; k <= 12; ++k) {
    const double update = 1e-3 * std::pow(2.0, -k), change = kUpdates * update;
    const auto fp32 = run(WeightStorage::Fp32Master, update), split = run(WeightStorage::SplitMaster, update);
    const auto kahan = run(WeightStorage::Kahan, update), random = run(WeightStorage::Stochastic, update);
    const auto pure = run(WeightStorage::Nearest, update);
    std::printf("| %d | %.2e | %.1e | %.1e | %.1e | %.1e | %.1e | %.0f%% | %.0f%% |\n", k, change, fp32.error,
                split.error, kahan.error, random.error, pure.error, 100 * pure.lost, 100 * kahan.lost);

    // FP32 in [1, 2]: each addition rounds by at most half a step of 2^-23.
    const double fp32_bound = kUpdates * 0x1p-24;
    EXPECT_LE(fp32.error, fp32_bound) << k;
    EXPECT_EQ(split.error, fp32.error) << k;
    EXPECT_EQ(fp32.lost, 0.0) << k;
    // Kahan: the compensation stays below half a step of the weight, 2^-8, where BF16 itself rounds by at
    // most 2^-17.
    EXPECT_LE(kahan.error, kUpdates * 0x1p-17) << k;
    // What the compensation itself rounds away, the meter tells: updates below 2^-17 once it has grown.
    EXPECT_EQ(kahan.lost > 0, update < 0x1p-17) << k;
    // Stochastic: independent roundings with a standard deviation of at most sqrt(update * step) each, where
    // step = 2^-7, averaged over the weights. Six of them: one false alarm in 10^9.
    EXPECT_LE(random.error, 6 * std::sqrt(kUpdates * update * 0x1p-7 / kWeights)) << k;
    EXPECT_EQ(random.lost, 0.0) << k;
    // Pure BF16: half a step at 1.0 is 2^-8 = 3.9e-3, so nothing ever moves.
    EXPECT_NEAR(pure.error, change, change * 1e-6) << k;
    EXPECT_EQ(pure.lost, 1.0) << k;
    EXPECT_EQ(pure.held, 1.0) << k;
    // A master's working copy moves by whole steps: held most of the time, nothing lost.
    EXPECT_GE(fp32.held, 1.0 - (change / 0x1p-7 + 1) / kUpdates) << k;
    EXPECT_LT(fp32.held, 1.0 + 1e-12) << k;
  }
}

TEST(StallMeter, NamesTheParameterThatLosesMost) {
  const Param large = make_param("large", torch::full({100}, 64.0), WeightStorage::Nearest, at::kBFloat16);
  const Param small =
      make_param("small", torch::full({100}, 1.0 / 64), WeightStorage::Nearest, at::kBFloat16);
  SGD optimizer({small, large}, {.lr = 1.0});
  for (const Param& param : {small, large}) param.working.mutable_grad() = torch::full({100}, 0.01);
  const auto report = optimizer.step({}, {.stalls = true});
  ASSERT_EQ(report.stalls().size(), 2u);
  EXPECT_EQ(report.stalls()[0].parameter, "small");
  EXPECT_EQ(report.stalls()[0].lost, 0);
  EXPECT_EQ(report.stalls()[1].lost, 100);
  EXPECT_EQ(report.stall().parameter, "large");
  EXPECT_EQ(report.stall().lost_fraction(), 0.5);
}

TEST(StallMeter, CountsOnlyWhereItIsAsked) {
  const Param param = make_param("w", torch::ones({10}), WeightStorage::Nearest, at::kBFloat16);
  SGD optimizer({param}, {.lr = 1.0});
  param.working.mutable_grad() = torch::ones({10});
  const auto report = optimizer.step({});
  EXPECT_NE(testing::error_of([&] { (void)report.stall(); }).find("{.stalls = true}"), std::string::npos);
}

TEST(StallMeter, GradientOfZeroIsNoUpdate) {
  const Param param = make_param("w", torch::ones({10}), WeightStorage::Nearest, at::kBFloat16);
  SGD optimizer({param}, {.lr = 1.0});
  param.working.mutable_grad() = torch::zeros({10});
  const auto stall = optimizer.step({}, {.stalls = true}).stall();
  EXPECT_EQ(stall.updates, 0);
  EXPECT_EQ(stall.lost_fraction(), 0.0);
}

}  // namespace
}  // namespace halfstep
