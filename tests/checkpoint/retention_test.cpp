#include "checkpoint_format/step_folders.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace halfstep::files {
namespace {

std::vector<KeptCheckpoint> healthy(const std::vector<int64_t>& steps) {
  std::vector<KeptCheckpoint> all;
  for (const int64_t step : steps) all.push_back({.step = step});
  return all;
}

/// What is left of a run that saves one checkpoint after the other.
std::vector<KeptCheckpoint> after_saving(const std::vector<KeptCheckpoint>& saved,
                                         const Retention& retention) {
  std::vector<KeptCheckpoint> kept;
  for (const KeptCheckpoint& one : saved) {
    kept.push_back(one);
    for (const int64_t step : steps_to_remove(kept, retention))
      std::erase_if(kept, [&](const KeptCheckpoint& each) { return each.step == step; });
  }
  return kept;
}

std::vector<int64_t> steps_of(const std::vector<KeptCheckpoint>& all) {
  std::vector<int64_t> steps;
  for (const KeptCheckpoint& one : all) steps.push_back(one.step);
  return steps;
}

TEST(Retention, KeepsTheLastOnes) {
  EXPECT_EQ(steps_to_remove(healthy({10, 20, 30, 40}), {.keep_last = 2}), (std::vector<int64_t>{10, 20}));
  EXPECT_TRUE(steps_to_remove(healthy({10, 20, 30, 40}), {.keep_last = 0}).empty());
  EXPECT_TRUE(steps_to_remove({}, {.keep_last = 2}).empty());
}

// Fault: skips from step 192 on, a checkpoint every ten steps, two kept: those of 310 and 320 were left.
TEST(Retention, ARunInTroubleRotatesNoHealthyCheckpointAway) {
  std::vector<KeptCheckpoint> saved = healthy({160, 170, 180, 190});
  for (int64_t step = 200; step <= 320; step += 10) saved.push_back({.step = step, .healthy = false});
  EXPECT_EQ(steps_of(after_saving(saved, {.keep_last = 2})), (std::vector<int64_t>{180, 190, 320}));
  // Once it has recovered, what was saved in between goes.
  saved.push_back({.step = 330});
  EXPECT_EQ(steps_of(after_saving(saved, {.keep_last = 2})), (std::vector<int64_t>{190, 330}));
}

TEST(Retention, KeepsTheBestMultiplesAndPinnedOnes) {
  const std::vector<KeptCheckpoint> saved = {{.step = 100, .score = 3.0},
                                             {.step = 150, .score = 1.5},
                                             {.step = 160, .healthy = false, .score = std::nan("")},
                                             {.step = 170, .pinned = true},
                                             {.step = 200, .score = 2.0},
                                             {.step = 210, .score = 1.5},
                                             {.step = 220}};
  EXPECT_EQ(steps_of(after_saving(saved, {.keep_last = 1})), (std::vector<int64_t>{170, 220}));
  EXPECT_EQ(steps_of(after_saving(saved, {.keep_last = 1, .keep_every = 100})),
            (std::vector<int64_t>{100, 170, 200, 220}));
  EXPECT_EQ(steps_of(after_saving(saved, {.keep_last = 1, .keep_best = true})),
            (std::vector<int64_t>{170, 210, 220}));
}

TEST(Retention, ALossThatIsNoNumberIsNotTheBest) {
  EXPECT_EQ(
      steps_of(after_saving({{.step = 1, .score = 2.0}, {.step = 2, .score = std::nan("")}, {.step = 3}},
                            {.keep_last = 1, .keep_best = true})),
      (std::vector<int64_t>{1, 3}));
}

// One overflow in FP16, just before: the weights are as they were.
TEST(Retention, WhatStaysForEverAndTheBestStayWhateverTheirHealth) {
  EXPECT_EQ(steps_of(after_saving({{.step = 100, .healthy = false},
                                   {.step = 110, .healthy = false, .score = 1.0},
                                   {.step = 120},
                                   {.step = 130}},
                                  {.keep_last = 1, .keep_every = 100, .keep_best = true})),
            (std::vector<int64_t>{100, 110, 130}));
}

TEST(Retention, WhateverTheHistoryTheNewestAndTheLastHealthyOnesStay) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const Retention retention{.keep_last = 1 + static_cast<int64_t>(random() % 4),
                              .keep_every = static_cast<int64_t>(random() % 3) * 30,
                              .keep_best = random() % 2 == 0};
    std::vector<KeptCheckpoint> saved;
    for (int64_t step = 10; step <= 300; step += 10)
      saved.push_back({.step = step,
                       .healthy = random() % 3 != 0,
                       .score = random() % 2 ? std::optional(double(random() % 100)) : std::nullopt,
                       .pinned = random() % 10 == 0});
    const std::vector<int64_t> kept = steps_of(after_saving(saved, retention));
    const auto stays = [&](int64_t step) { return std::binary_search(kept.begin(), kept.end(), step); };
    EXPECT_TRUE(stays(300));
    int64_t last_healthy = retention.keep_last;
    for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
      const bool among_last = one->healthy && last_healthy-- > 0;
      const bool multiple = retention.keep_every > 0 && one->step % retention.keep_every == 0;
      EXPECT_TRUE(stays(one->step) || !(among_last || multiple || one->pinned)) << one->step;
    }
  }
}

}  // namespace
}  // namespace halfstep::files
