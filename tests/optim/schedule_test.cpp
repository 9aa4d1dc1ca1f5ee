#include <gtest/gtest.h>
#include <halfstep/schedule.h>

#include <cmath>

#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::error_of;

TEST(Schedule, ConstantIsOneFromTheFirstStep) {
  for (const int64_t step : {0, 1, 1000}) EXPECT_EQ(Schedule{}.factor(step), 1.0);
}

TEST(Schedule, WarmUpRisesInALineAndWastesNoStep) {
  const auto schedule = Schedule::constant(4);
  const double expected[] = {0.2, 0.4, 0.6, 0.8, 1.0, 1.0};
  for (int step = 0; step < 6; ++step) EXPECT_DOUBLE_EQ(schedule.factor(step), expected[step]);
}

TEST(Schedule, LinearFallsInALineToTheFinalFraction) {
  const auto schedule = Schedule::linear({.warmup_steps = 10, .total_steps = 110, .final_fraction = 0.1});
  EXPECT_DOUBLE_EQ(schedule.factor(10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(60), 0.55);
  EXPECT_DOUBLE_EQ(schedule.factor(109), 1.0 - 0.9 * 0.99);
  EXPECT_DOUBLE_EQ(schedule.factor(110), 0.1);
  EXPECT_DOUBLE_EQ(schedule.factor(100000), 0.1);
}

TEST(Schedule, CosineIsHalfwayInTheMiddleAndFlatAtBothEnds) {
  const auto schedule = Schedule::cosine({.warmup_steps = 10, .total_steps = 1010, .final_fraction = 0.2});
  EXPECT_DOUBLE_EQ(schedule.factor(10), 1.0);
  EXPECT_NEAR(schedule.factor(510), 0.6, 1e-15);
  EXPECT_NEAR(schedule.factor(260), 0.2 + 0.8 * (0.5 + std::sqrt(0.125)), 1e-15);  // cos(pi/4) = sqrt(1/2)
  // The slope at the ends is that of 1 - (pi p)^2 / 4 with p = 1/1000: below 2.5e-6 times 0.8.
  EXPECT_LT(1.0 - schedule.factor(11), 2e-6);
  EXPECT_LT(schedule.factor(1009) - 0.2, 2e-6);
  EXPECT_DOUBLE_EQ(schedule.factor(1010), 0.2);
}

TEST(Schedule, WsdIsStableUntilItsDecay) {
  const auto schedule = Schedule::wsd({.warmup_steps = 9, .total_steps = 100, .decay_steps = 20});
  EXPECT_DOUBLE_EQ(schedule.factor(0), 0.1);
  for (const int64_t step : {9, 50, 80}) EXPECT_DOUBLE_EQ(schedule.factor(step), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(90), 0.5);
  EXPECT_DOUBLE_EQ(schedule.factor(100), 0.0);
}

TEST(Schedule, NeverRisesAfterWarmUpNorFallsBelowTheFinalFraction) {
  const Schedule::Spans spans{.warmup_steps = 7, .total_steps = 50, .decay_steps = 43, .final_fraction = 0.3};
  for (const auto& schedule : {Schedule::linear(spans), Schedule::cosine(spans), Schedule::wsd(spans)}) {
    double before = 1.0;
    for (int64_t step = 7; step < 60; ++step) {
      const double factor = schedule.factor(step);
      EXPECT_LE(factor, before) << step;
      EXPECT_GE(factor, 0.3) << step;
      before = factor;
    }
  }
}

TEST(Schedule, SpansThatMakeNoSenseAreRefusedByName) {
  const auto refused = [](const char* what, auto&& make) {
    EXPECT_NE(error_of(make).find(what), std::string::npos) << error_of(make);
  };
  refused("total_steps is 0", [] { (void)Schedule::cosine({}); });
  refused("total_steps is 5", [] { (void)Schedule::linear({.warmup_steps = 5, .total_steps = 5}); });
  refused("decay_steps is 0", [] { (void)Schedule::wsd({.total_steps = 10}); });
  refused("decay_steps is 9",
          [] { (void)Schedule::wsd({.warmup_steps = 2, .total_steps = 10, .decay_steps = 9}); });
  refused("warmup_steps is -1", [] { (void)Schedule::constant(-1); });
  refused("final_fraction is nan", [] { (void)Schedule::linear({.total_steps = 9, .final_fraction = NAN}); });
  refused("step is -1", [] { (void)Schedule{}.factor(-1); });
}

}  // namespace
}  // namespace halfstep
