#include "forecast/choice.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>

#include "forecast/shapes.h"

namespace halfstep::forecast {
namespace {

TEST(Choice, TheLargestMicroBatchFitsAndOneMoreDoesNot) {
  const Device& h100 = device_named("h100");
  for (const auto& [word, sharding] : kShardings) {
    Arrangement arrangement{.ranks = 64, .sharding = sharding, .sequence_length = 4096};
    const ModelShape shape = known("llama-1b");
    const int64_t largest = largest_micro_batch(shape, precision_plan("bf16"), arrangement, h100);
    ASSERT_GT(largest, 0) << word;
    arrangement.micro_batch = largest;
    EXPECT_TRUE(outcome_of(shape, precision_plan("bf16"), arrangement, h100).fits);
    ++arrangement.micro_batch;
    EXPECT_FALSE(outcome_of(shape, precision_plan("bf16"), arrangement, h100).fits);
  }
}

TEST(Choice, AModelThatIsTooLargeFitsNoMicroBatch) {
  EXPECT_EQ(largest_micro_batch(known("llama-405b"), precision_plan("bf16"), {}, device_named("h100")), 0);
}

// Every arrangement by hand, and none that fits is quicker than the one that was chosen.
TEST(Choice, NoArrangementThatFitsIsQuickerThanTheCheapest) {
  const Device& h100 = device_named("h100");
  const ModelShape shape = known("llama-8b");
  const PrecisionPlan precision = precision_plan("bf16");
  const auto outcomes =
      best_of_each_sharding(shape, precision, {.ranks = 64, .sequence_length = 8192, .batch = 512}, h100);
  ASSERT_EQ(outcomes.size(), 4u);
  const Outcome* const best = cheapest(outcomes);
  ASSERT_NE(best, nullptr);
  EXPECT_EQ(best->arrangement.step_tokens(), 512 * 8192);
  for (const auto& [word, sharding] : kShardings)
    for (const bool recomputes : {false, true})
      for (const int64_t micro_batch : {1, 2, 4, 8}) {
        const Outcome outcome = outcome_of(shape, precision,
                                           {.ranks = 64,
                                            .sharding = sharding,
                                            .sequence_length = 8192,
                                            .micro_batch = micro_batch,
                                            .accumulation = 8 / micro_batch,
                                            .recomputes_blocks = recomputes},
                                           h100);
        if (!outcome.fits) continue;
        EXPECT_LE(outcome.tokens_per_second_per_device, 1.001 * best->tokens_per_second_per_device) << word;
      }
}

TEST(Choice, WhatIsAskedForIsNotChosen) {
  const auto outcomes = best_of_each_sharding(known("llama-8b"), precision_plan("bf16"),
                                              {.ranks = 8,
                                               .sequence_length = 2048,
                                               .sharding = Sharding::None,
                                               .micro_batch = 1,
                                               .recomputes_blocks = true},
                                              device_named("h100"));
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_FALSE(outcomes.front().fits);  // 16 bytes a parameter are 128 GB
  EXPECT_TRUE(outcomes.front().arrangement.recomputes_blocks);
  EXPECT_EQ(cheapest(outcomes), nullptr);
}

TEST(Choice, ABatchThatRanksCannotShareIsRefused) {
  const auto ask = [](const Question& question) {
    return best_of_each_sharding(known("gpt2-124m"), precision_plan("bf16"), question, device_named("h100"));
  };
  EXPECT_THROW(ask({.ranks = 8, .batch = 12}), Error);
  EXPECT_THROW(ask({.ranks = 8, .micro_batch = 2, .batch = 24}), Error);
}

TEST(Choice, OneRankIsAskedAboutOnce) {
  EXPECT_EQ(
      best_of_each_sharding(known("gpt2-124m"), precision_plan("bf16"), {}, device_named("a100")).size(), 1u);
}

}  // namespace
}  // namespace halfstep::forecast
