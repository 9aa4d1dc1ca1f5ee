// What the benchmarks' figures stand on: the statistics, the model, the text, the judgement.
#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <cmath>
#include <random>

#include "support/gpt.h"
#include "support/statistics.h"
#include "support/text.h"

namespace bench {
namespace {

TEST(Statistics, NineOfTenIntervalsHoldTheTrueMean) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(3.0, 2.0);
  constexpr int kTrials = 20'000;
  for (const std::size_t count : {2, 4, 16, 32}) {
    int held = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      std::vector<double> values(count);
      for (double& value : values) value = normal(random);
      const Interval interval = mean_with_90_percent(values);
      held += interval.low <= 3.0 && 3.0 <= interval.high;
    }
    // Four standard deviations of a share of 0.9 in so many trials.
    EXPECT_NEAR(static_cast<double>(held) / kTrials, 0.9, 4 * std::sqrt(0.9 * 0.1 / kTrials)) << count;
  }
}

TEST(Statistics, MedianIsTheMiddleValueOrBetweenTheTwo) {
  EXPECT_EQ(median({5, 1, 3}), 3);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
}

TEST(Gpt, HasTheShapesOfGpt2) {
  const Gpt model(kGpt2);
  EXPECT_EQ(parameter_count(model), 124'439'808);  // as published for the smallest GPT-2
  EXPECT_EQ(model.parameters().size(), 148u);
}

TEST(Gpt, KnowsNothingAtFirstAndNeverLooksAhead) {
  at::manual_seed(1);
  Gpt model(kByteGpt);
  const at::Tensor tokens = at::randint(256, {4, kByteGpt.context});
  // Uniform over 256 bytes, give or take what random weights prefer.
  EXPECT_NEAR(model.loss(tokens, at::randint_like(tokens, 256)).item<double>(), std::log(256.0), 0.1);

  // Only the first target counts (the others are "ignore"), so only the first token may.
  at::Tensor first_target = at::full_like(tokens, -100);
  first_target.select(1, 0).fill_(7);
  at::Tensor other_ends = tokens.clone();
  other_ends.slice(1, 1).copy_(at::randint(256, {4, kByteGpt.context - 1}));
  EXPECT_EQ(model.loss(tokens, first_target).item<float>(),
            model.loss(other_ends, first_target).item<float>());
}

TEST(Gpt, BlocksComputedAgainGiveTheSameGradients) {
  const at::Tensor tokens = at::randint(256, {4, kByteGpt.context});
  const auto grads_with = [&](BlockActivations activations) {
    at::manual_seed(1);
    Gpt model(kByteGpt, activations);
    model.loss(tokens, tokens).backward();
    std::vector<at::Tensor> grads;
    for (const auto& parameter : model.parameters()) grads.push_back(parameter.grad());
    return grads;
  };
  const auto kept = grads_with(BlockActivations::Kept), again = grads_with(BlockActivations::ComputedAgain);
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], again[i])) << i;
}

TEST(Text, TargetsAreTheBytesThatFollow) {
  const at::Tensor text = at::arange(1000, at::kLong);
  const Batch random = random_batch(text, 64, 10, at::detail::createCPUGenerator(1));
  const Batch even = even_batch(text, 64, 10);
  for (const Batch& batch : {random, even}) {
    EXPECT_EQ(batch.tokens.sizes(), (at::IntArrayRef{64, 10}));
    EXPECT_TRUE(at::equal(batch.targets, batch.tokens + 1));
    EXPECT_LT(batch.targets.max().item<int64_t>(), 1000);
  }
}

TEST(Text, TinyShakespeareBeginsAsItDoes) {
  const at::Tensor text = tiny_shakespeare();
  const std::string begin = "First Citizen:\nBefore we proceed any further";
  for (std::size_t i = 0; i < begin.size(); ++i)
    ASSERT_EQ(text[static_cast<int64_t>(i)].item<int64_t>(), begin[i]) << i;
}

TEST(Text, WithoutThePackageTheErrorTellsTheRemedy) {
  const char* kept = std::getenv("HALFSTEP_PYTHON");
  const std::string restore = kept ? kept : "";
  setenv("HALFSTEP_PYTHON", "/nowhere/python", 1);
  try {
    (void)tiny_shakespeare();
    ADD_FAILURE() << "found a text without a Python";
  } catch (const halfstep::Error& error) {
    EXPECT_NE(std::string(error.what()).find("tools/setup"), std::string::npos) << error.what();
  }
  kept ? setenv("HALFSTEP_PYTHON", restore.c_str(), 1) : unsetenv("HALFSTEP_PYTHON");
}

}  // namespace
}  // namespace bench
