#include "cli/step_pace.h"

#include <gtest/gtest.h>

namespace halfstep::cli {
namespace {

TEST(StepPace, SaysNothingBeforeTwoStepsOrAfterTheLast) {
  StepPace pace(3, 0);
  EXPECT_FALSE(pace.seconds_left());
  pace.step(1, 100.0);  // its time may hold the loading of the model
  EXPECT_FALSE(pace.seconds_left());
  pace.step(2, 102.0);
  EXPECT_DOUBLE_EQ(pace.seconds_left().value(), 2.0);
  pace.step(3, 104.0);
  EXPECT_FALSE(pace.seconds_left());
}

TEST(StepPace, ARunOfOneStepHasNoEstimate) {
  StepPace pace(1, 0);
  pace.step(1, 1.0);
  EXPECT_FALSE(pace.seconds_left());
}

TEST(StepPace, OneOddStepDoesNotMoveIt) {
  StepPace pace(1000, 0);
  double seconds = 0.0;
  for (int64_t step = 1; step <= 20; ++step) pace.step(step, seconds += step == 15 ? 60.0 : 0.5);
  EXPECT_NEAR(pace.seconds_left().value(), 980 * 0.5, 1e-9);
}

TEST(StepPace, FollowsAMachineThatBecameSlower) {
  StepPace pace(1000, 0);
  double seconds = 0.0;
  for (int64_t step = 1; step <= 200; ++step) pace.step(step, seconds += step <= 140 ? 0.5 : 1.0);
  EXPECT_NEAR(pace.seconds_left().value(), 800 * 1.0, 1e-9);
}

TEST(StepPace, EvaluationsThatCameWillComeAgain) {
  // 0.5 s a step, and 20 s of evaluation after every hundredth.
  StepPace pace(1000, 0);
  double seconds = 0.0;
  for (int64_t step = 1; step <= 450; ++step) {
    pace.step(step, seconds += 0.5);
    if (step % 100 != 0) continue;
    pace.pause();
    seconds += 20.0;
  }
  // 550 steps and the evaluations after 500 to 1000. Four pauses over 401 steps (1 to 401) spread to 110 s of
  // pauses: what is missing is the part of an evaluation that comes early.
  const double truth = 550 * 0.5 + 5 * 20.0;
  EXPECT_NEAR(pace.seconds_left().value(), truth, 20.0);
  EXPECT_GT(pace.seconds_left().value(), 550 * 0.5 + 4 * 20.0);
}

TEST(StepPace, DoesNotSinkBetweenPauses) {
  StepPace pace(1000, 0);
  double seconds = 0.0;
  for (int64_t step = 1; step <= 150; ++step) {
    pace.step(step, seconds += 1.0);
    if (step == 100) {
      pace.pause();
      seconds += 50.0;
    }
  }
  const double at_150 = pace.seconds_left().value();
  for (int64_t step = 151; step <= 190; ++step) pace.step(step, seconds += 1.0);
  EXPECT_NEAR(at_150 - pace.seconds_left().value(), 40 * 1.5, 1e-6);  // 1 s and half a second of pause a step
}

TEST(StepPace, APauseAfterEveryStepBelongsToTheStep) {
  StepPace pace(10, 0);
  double seconds = 0.0;
  for (int64_t step = 1; step <= 5; ++step) {
    pace.step(step, seconds += 1.0);
    pace.pause();
    seconds += 2.0;
  }
  EXPECT_NEAR(pace.seconds_left().value(), 5 * 3.0, 1e-9);
}

TEST(StepPace, StepsThatWereNotToldAreCounted) {
  StepPace pace(1000, 400);
  pace.step(410, 50.0);
  pace.step(420, 55.0);
  pace.step(430, 60.0);
  EXPECT_NEAR(pace.seconds_left().value(), 570 * 0.5, 1e-9);
}

}  // namespace
}  // namespace halfstep::cli
