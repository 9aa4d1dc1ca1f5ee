// Runs with a known difference: it is found, and none is found where there is none.
#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <cmath>

#include "report/run_report.h"
#include "report/synthetic_run.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::SyntheticRun;

/// In memory: two hundred pairs of logs on a disk would say no more.
RunHistory history_of(const std::string& name, const SyntheticRun& run) {
  RunHistory history{.name = name};
  history.sittings.emplace_back().header.configuration = testing::synthetic_configuration(run);
  const auto losses = testing::synthetic_losses(run);
  for (size_t i = 0; i < losses.size(); ++i)
    history.steps.push_back({.step = static_cast<int64_t>(i) + 1, .loss = losses[i], .items = 1});
  return history;
}

LossDifference difference(const SyntheticRun& a, const SyntheticRun& b) {
  const RunHistory runs[] = {history_of("a", a), history_of("b", b)};
  return compare_runs(runs).pairs.front();
}

struct Tally {
  int same = 0, unclear = 0, different = 0;
};

Tally over_pairs(double loss_factor, bool same_batches, double own_noise) {
  Tally tally;
  for (uint64_t pair = 0; pair < 200; ++pair) {
    const SyntheticRun a{.steps = 500, .batch_seed = 2 * pair, .own_seed = 1, .own_noise = own_noise};
    SyntheticRun b = a;
    b.own_seed = 2;
    b.loss_factor = loss_factor;
    if (!same_batches) b.batch_seed += 1;
    const Likeness likeness = difference(a, b).likeness;
    tally.same += likeness == Likeness::Same ? 1 : 0;
    tally.unclear += likeness == Likeness::Unclear ? 1 : 0;
    tally.different += likeness == Likeness::Different ? 1 : 0;
  }
  return tally;
}

// The interval misses about 5% of the time, and a miss cries wolf only if it lies beyond the margin too.
TEST(CompareRuns, DoesNotCryWolf) {
  EXPECT_LE(over_pairs(1.0, true, 0.0005).different, 2);
  EXPECT_LE(over_pairs(1.0, true, 0.003).different, 10);
  EXPECT_LE(over_pairs(1.0, false, 0.003).different, 10);
}

TEST(CompareRuns, SeesADifferenceThatIsThere) {
  EXPECT_GE(over_pairs(1.01, true, 0.0005).different, 190);
  EXPECT_GE(over_pairs(1.02, true, 0.001).different, 190);
  EXPECT_GE(over_pairs(0.98, true, 0.001).different, 190);
}

TEST(CompareRuns, CallsEqualRunsTheSameWhenTheNoiseAllowsIt) {
  EXPECT_GE(over_pairs(1.0, true, 0.0005).same, 190);
}

// A true difference of twice the margin must not pass for the same: the interval would have to miss.
TEST(CompareRuns, DoesNotCallDifferentRunsTheSame) {
  EXPECT_LE(over_pairs(1.005, true, 0.0005).same, 10);
  EXPECT_LE(over_pairs(1.005, true, 0.003).same, 10);
}

TEST(CompareRuns, OtherBatchesCannotBePairedAndTheReasonIsTold) {
  const LossDifference other = difference({.batch_seed = 1}, {.batch_seed = 2});
  EXPECT_FALSE(other.paired);
  EXPECT_EQ(other.why_unpaired, "data.seed differs");
  EXPECT_EQ(other.likeness, Likeness::Unclear);  // 3.5% of noise a step hide 0.25% in 200 of them
  // The same batches: their noise cancels.
  EXPECT_LT(difference({.own_seed = 1}, {.own_seed = 2}).half_width, 0.5 * other.half_width);
}

TEST(CompareRuns, TheDifferenceIsThatOfTheMeans) {
  const SyntheticRun a{.own_seed = 1}, b{.own_seed = 2, .loss_factor = 1.01};
  const auto first = testing::synthetic_losses(a), second = testing::synthetic_losses(b);
  double sum = 0, reference = 0;
  for (size_t i = 800; i < 1000; ++i) {  // the last fifth
    sum += second[i] - first[i];
    reference += first[i];
  }
  const LossDifference found = difference(a, b);
  EXPECT_EQ(found.steps, 200);
  EXPECT_NEAR(found.mean, sum / 200, 1e-12);
  EXPECT_NEAR(found.margin, 0.0025 * reference / 200, 1e-12);
}

TEST(CompareRuns, IdenticalLossesAreToldAsSuch) {
  const RunHistory runs[] = {history_of("straight", {}), history_of("resumed", {})};
  const RunComparison comparison = compare_runs(runs);
  EXPECT_TRUE(comparison.pairs.front().identical);
  EXPECT_EQ(comparison.pairs.front().likeness, Likeness::Same);
  EXPECT_TRUE(
      comparison.sentence.starts_with("straight and resumed are identical: every loss has the same bits."))
      << comparison.sentence;
}

TEST(CompareRuns, TheFirstSentenceNamesThoseThatAreTheSame) {
  const RunHistory runs[] = {history_of("fp32", {.own_seed = 1, .own_noise = 0.0005}),
                             history_of("bf16", {.own_seed = 2, .own_noise = 0.0005}),
                             history_of("fp16", {.own_seed = 3, .loss_factor = 1.02, .own_noise = 0.0005}),
                             history_of("fp8", {.own_seed = 4, .loss_factor = 1.02, .own_noise = 0.0005})};
  const std::string sentence = compare_runs(runs).sentence;
  EXPECT_TRUE(sentence.starts_with("fp32 and bf16 are the same within noise: ")) << sentence;
  EXPECT_NE(sentence.find("fp16 and fp8 are the same within noise: "), std::string::npos) << sentence;
  EXPECT_NE(sentence.find("fp16 differs from fp32 by +2."), std::string::npos) << sentence;
  EXPECT_NE(sentence.find("fp8 differs from fp32 by +2."), std::string::npos) << sentence;
}

TEST(CompareRuns, ARunThatLostItsLossIsNotComparedByWhatIsLeft) {
  const RunHistory runs[] = {history_of("whole", {.own_seed = 1}),
                             history_of("lost", {.own_seed = 2, .nan_from = 950})};
  const RunComparison comparison = compare_runs(runs);
  EXPECT_EQ(comparison.pairs.front().likeness, Likeness::NotFinite);
  EXPECT_EQ(comparison.rows[1].not_finite, 51);
  EXPECT_NE(comparison.sentence.find("lost's loss is NaN or Inf in 51 steps of these"), std::string::npos)
      << comparison.sentence;
}

TEST(CompareRuns, RunsOfDifferentLengthAreComparedWhereBothAre) {
  const RunHistory runs[] = {
      history_of("long", {.steps = 1000, .planned_steps = 1000, .own_noise = 0.0005}),
      history_of("short", {.steps = 600, .planned_steps = 1000, .own_seed = 2, .own_noise = 0.0005})};
  const RunComparison comparison = compare_runs(runs);
  EXPECT_EQ(comparison.first_step, 481);
  EXPECT_EQ(comparison.last_step, 600);
  EXPECT_EQ(comparison.pairs.front().likeness, Likeness::Same);
  EXPECT_NE(comparison.sentence.find("the last that all of them have"), std::string::npos);
}

TEST(CompareRuns, WhatCannotBeComparedIsSaid) {
  const RunHistory one[] = {history_of("alone", {})};
  EXPECT_NE(testing::error_of([&] { (void)compare_runs(one); }).find("needs two or more"), std::string::npos);
  const RunHistory empty[] = {history_of("a", {}), history_of("b", {.steps = 0, .planned_steps = 5})};
  EXPECT_NE(testing::error_of([&] { (void)compare_runs(empty); }).find("'b' has logged no step"),
            std::string::npos);
  EXPECT_EQ(difference({.steps = 5}, {.steps = 5, .own_seed = 2}).likeness, Likeness::TooShort);
  const RunHistory twice[] = {history_of("a", {.steps = 3}), history_of("b", {.steps = 3})};
  EXPECT_EQ(compare_runs(twice).sentence,
            "b and a are identical: every loss has the same bits. Compared over steps 1 to 3.");
  const RunHistory brief[] = {history_of("a", {.steps = 3}), history_of("b", {.steps = 3, .own_seed = 2})};
  EXPECT_EQ(compare_runs(brief).sentence,
            "b and a have too few steps in common to compare: 3, at least 10 are needed. "
            "Compared over steps 1 to 3.");
}

}  // namespace
}  // namespace halfstep
