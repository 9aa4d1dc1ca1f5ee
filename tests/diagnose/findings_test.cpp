// Each rule: records that must give its finding, and healthy or similar ones that must not. The records are
// made here; what a healthy run looks like was taken from real ones (their shares stand beside the tests).
#include <gtest/gtest.h>
#include <halfstep/findings.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <sstream>

#include "kernels/statistics.h"
#include "log/records.h"

namespace halfstep {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

StepRecord healthy_step(int64_t step) {
  StepRecord record = testing::plain_record(step);
  // Falls from 5.5 to 2.5, with the noise of small batches.
  std::mt19937_64 noise(static_cast<uint64_t>(step));
  record.loss = 2.5 + 3.0 * std::exp(-static_cast<double>(step) / 300.0) +
                std::normal_distribution<double>(0.0, 0.08)(noise);
  record.grad_norm = 1.0;
  record.stalled_share = 5e-5;
  return record;
}

StepRecord fp16_step(int64_t step, double loss_scale, bool skipped = false) {
  StepRecord record = healthy_step(step);
  record.loss_scale = loss_scale;
  record.skipped = skipped;
  if (skipped) {
    record.why = "the gradient of h.0.w is not finite";
    record.parameter = "h.0.w";
    record.grad_norm = std::numeric_limits<double>::infinity();
    record.stalled_share.reset();
  }
  return record;
}

CulpritRecord culprit_of(int64_t step, const std::string& op, const std::string& layer,
                         const std::string& direction = "forward") {
  CulpritRecord record = testing::some_culprit(step);
  record.rank = 0;
  record.op = op;
  record.inside = "";
  record.layer = layer;
  record.direction = direction;
  return record;
}

ProbeRecord probe_of(int64_t step, const std::string& role, const std::string& name,
                     const std::vector<float>& values) {
  ProbeRecord record{.step = step, .seconds = 0.0, .role = role, .name = name};
  add_statistics(Format::FP32, values.data(), values.size(), record.stats);
  return record;
}

/// Normally distributed values of this size.
std::vector<float> normal(double size, size_t count = 4096, uint64_t seed = 1) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<double> distribution(0.0, size);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(distribution(bits));
  return values;
}

/// As FP16 stores them: its smallest magnitude is 2^-24, and half of it rounds to zero.
std::vector<float> flushed_below_fp16(std::vector<float> values) {
  for (float& value : values)
    if (std::abs(value) <= 0x1p-25f) value = 0.0f;
  return values;
}

/// One run: what was found, by code; how often each was told.
class WatchedRun {
 public:
  explicit WatchedRun(RunSetup setup = {}) : watch_(std::move(setup)) {}

  template <typename Record>
  void take(const Record& record) {
    for (const Finding& finding : watch_.take(record)) ++told_[finding.code];
  }

  /// "warning", or "" where it was not found.
  std::string severity(std::string_view code) const {
    for (const Finding& finding : watch_.findings())
      if (finding.code == code) return std::string(to_string(finding.severity));
    return "";
  }
  Finding finding(std::string_view code) const {
    for (const Finding& finding : watch_.findings())
      if (finding.code == code) return finding;
    ADD_FAILURE() << code << " was not found";
    return {};
  }
  int told(const std::string& code) const { return told_.contains(code) ? told_.at(code) : 0; }
  std::vector<Finding> findings() const { return watch_.findings(); }
  std::string first() const { return findings().empty() ? "" : findings().front().code; }

  std::string above_note() const {
    std::ostringstream text;
    for (const Finding& finding : findings())
      if (finding.severity != Severity::Note) text << finding.code << ": " << finding.what << "\n";
    return text.str();
  }

 private:
  FindingWatch watch_;
  std::map<std::string, int> told_{};
};

const RunSetup kFp16{.compute = "fp16"};

TEST(HealthyRuns, HaveNothingAboveNote) {
  for (const char* compute : {"fp32", "bf16", "fp8-current", "mxfp8"}) {
    WatchedRun run({.compute = compute});
    for (int64_t step = 1; step <= 3000; ++step) {
      StepRecord record = healthy_step(step);
      if (std::string_view(compute) != "bf16" && std::string_view(compute) != "fp32") {
        record.saturated_share = 0.0;
        record.vanished_share = 6e-5;  // of 150 steps of the preset tiny: 2e-5 to 6e-5 on average
      }
      run.take(record);
    }
    EXPECT_EQ(run.above_note(), "") << compute;
  }
}

TEST(HealthyRuns, Nvfp4SaturatesAndFlushesByDesign) {
  WatchedRun run({.compute = "nvfp4"});
  for (int64_t step = 1; step <= 500; ++step) {
    StepRecord record = healthy_step(step);
    record.saturated_share = 0.0183;  // measured: 150 steps of the preset tiny
    record.vanished_share = 0.09;
    run.take(record);
  }
  EXPECT_EQ(run.above_note(), "");
}

TEST(HealthyRuns, DelayedScalingMeetsALargerValueNowAndThen) {
  WatchedRun run({.compute = "fp8-delayed"});
  for (int64_t step = 1; step <= 500; ++step) {
    StepRecord record = healthy_step(step);
    record.saturated_share = step % 40 == 7 ? 4.2e-4 : 0.0;  // measured: the highest of 150 steps
    record.vanished_share = 2.8e-4;
    run.take(record);
  }
  EXPECT_EQ(run.above_note(), "");
}

TEST(HealthyRuns, Fp16FindsItsScaleAndTriesALargerOneEvery2000Steps) {
  WatchedRun run(kFp16);
  double scale = 0x1p16;
  int64_t clean = 0;
  for (int64_t step = 1; step <= 20'000; ++step) {
    const bool overflows = scale > 0x1p11;
    run.take(fp16_step(step, scale, overflows));
    if (overflows) run.take(culprit_of(step, "mm", "h.0.mlp", "backward"));
    clean = overflows ? 0 : clean + 1;
    if (overflows) scale /= 2;
    if (clean == 2000) scale *= 2, clean = 0;
  }
  EXPECT_EQ(run.above_note(), "");
}

TEST(NanProducer, NamesOperationLayerAndVerdict) {
  WatchedRun run({.compute = "bf16"});
  run.take(healthy_step(1));
  run.take(culprit_of(2, "exp", "h.3.mlp"));
  const Finding finding = run.finding("nan-producer");
  EXPECT_EQ(finding.severity, Severity::Serious);
  EXPECT_EQ(finding.step, 2);
  EXPECT_EQ(finding.op, "exp");
  EXPECT_EQ(finding.layer, "h.3.mlp");
  EXPECT_NE(finding.what.find("exp in h.3.mlp (forward)"), std::string::npos) << finding.what;
  EXPECT_NE(finding.evidence.find("-3.1 to 71.2"), std::string::npos) << finding.evidence;
  EXPECT_NE(finding.evidence.find("precision is the cause"), std::string::npos) << finding.evidence;
  EXPECT_NE(finding.remedy.find("precision.ops.exp=fp32"), std::string::npos) << finding.remedy;
}

TEST(NanProducer, RemedyIsNoPrecisionWhereFp32OverflowsItself) {
  // As layer norm does inside, of values of 10^20: its result would fit.
  WatchedRun run({.compute = "fp32"});
  CulpritRecord record = culprit_of(2, "native_layer_norm", "h.0.ln_1");
  record.output = "FP32 [4, 64]: of 256 numbers 0 Inf and 192 NaN";
  run.take(record);
  const std::string remedy = run.finding("nan-producer").remedy;
  EXPECT_EQ(remedy.find("precision.ops"), std::string::npos) << remedy;
  EXPECT_EQ(remedy.find("rain in bf16"), std::string::npos) << remedy;
  EXPECT_NE(remedy.find("lower the learning rate"), std::string::npos) << remedy;
}

TEST(NanProducer, PlaceBetweenLayersReadsAsOne) {
  WatchedRun run(kFp16);
  run.take(fp16_step(1, 0x1p16, true));
  run.take(culprit_of(2, "exp", "after h.0.mlp"));
  EXPECT_EQ(run.finding("nan-producer").what,
            "exp after h.0.mlp (forward) made numbers that are not finite at step 2.");
}

TEST(NanProducer, RemedyIsNotPrecisionWherePrecisionIsNotTheCause) {
  WatchedRun run({.compute = "fp16"});
  CulpritRecord record = culprit_of(2, "log", "head");
  record.precision_is_cause = false;
  run.take(record);
  EXPECT_EQ(run.finding("nan-producer").remedy.find("fp32"), std::string::npos);
  CulpritRecord input = culprit_of(2, "input", "embedding");
  input.precision_is_cause = false;
  WatchedRun other({.compute = "bf16"});
  other.take(input);
  EXPECT_NE(other.finding("nan-producer").remedy.find("data"), std::string::npos);
}

TEST(NanProducer, RemedyIsNoFp32WhereTheOperationRanInIt) {
  for (const auto& [output, fp32, bf16] : {std::tuple{"FP16 [8]: of 8 numbers 3 Inf and 0 NaN", true, true},
                                           {"BF16 [8]: of 8 numbers 3 Inf and 0 NaN", true, false},
                                           {"FP32 [8]: of 8 numbers 3 Inf and 0 NaN", false, false}}) {
    WatchedRun run({.compute = "bf16"});
    CulpritRecord record = culprit_of(2, "norm", "head");
    record.output = output;
    run.take(record);
    const std::string remedy = run.finding("nan-producer").remedy;
    EXPECT_EQ(remedy.find("precision.ops.norm=fp32") != remedy.npos, fp32) << remedy;
    EXPECT_EQ(remedy.find("train in bf16") != remedy.npos, bf16) << remedy;
  }
}

TEST(NanProducer, OverflowOfTheLossScaleInBackwardIsANote) {
  WatchedRun run(kFp16);
  run.take(fp16_step(1, 0x1p16, true));
  run.take(culprit_of(1, "mm", "h.0.mlp", "backward"));
  EXPECT_EQ(run.severity("nan-producer"), "note");
  run.take(culprit_of(9, "exp", "h.0.mlp", "forward"));
  EXPECT_EQ(run.severity("nan-producer"), "serious");
  EXPECT_EQ(run.told("nan-producer"), 2);
}

TEST(AttentionLogits, OverflowInFp16IsNamedInsteadOfItsOperation) {
  for (const auto& [op, layer] :
       {std::pair{"bmm", "after h.2.attn.c_attn"},
        std::pair{"_scaled_dot_product_flash_attention_for_cpu", "after h.2.qkv"}}) {
    WatchedRun run(kFp16);
    run.take(fp16_step(1, 0x1p16));
    run.take(culprit_of(2, op, layer));
    EXPECT_EQ(run.first(), "overflow-attention-logits") << op;
    EXPECT_EQ(run.finding("overflow-attention-logits").layer, layer);
    EXPECT_EQ(run.severity("nan-producer"), "") << op;
  }
}

TEST(AttentionLogits, LinearLayersOfAttentionAreNotLogits) {
  WatchedRun run(kFp16);
  run.take(culprit_of(2, "addmm", "h.2.attn.c_attn"));
  EXPECT_EQ(run.first(), "nan-producer");
  EXPECT_EQ(run.severity("overflow-attention-logits"), "");
  WatchedRun product(kFp16);
  product.take(culprit_of(2, "bmm", "experts.3"));
  EXPECT_EQ(product.first(), "nan-producer");
  WatchedRun bf16({.compute = "bf16"});
  bf16.take(culprit_of(2, "bmm", "after h.2.attn.c_attn"));
  EXPECT_EQ(bf16.first(), "nan-producer");
}

TEST(Activations, NearFp16sLargestNumberAreAWarning) {
  std::vector<float> values = normal(1.0);
  values[17] = -40'000.0f;
  WatchedRun run(kFp16);
  run.take(probe_of(50, "activation", "h.3.mlp", values));
  EXPECT_EQ(run.severity("activation-near-overflow"), "warning");
  EXPECT_EQ(run.finding("activation-near-overflow").layer, "h.3.mlp");
  WatchedRun attention(kFp16);
  attention.take(probe_of(50, "activation", "h.3.attn.c_attn", values));
  EXPECT_EQ(attention.severity("overflow-attention-logits"), "warning");
  WatchedRun bf16({.compute = "bf16"});
  bf16.take(probe_of(50, "activation", "h.3.mlp", values));
  EXPECT_TRUE(bf16.findings().empty());
  values[17] = -30'000.0f;  // below half of 65504
  WatchedRun below(kFp16);
  below.take(probe_of(50, "activation", "h.3.mlp", values));
  EXPECT_TRUE(below.findings().empty());
}

/// Two samples of the same gradients, and the steps that close them.
WatchedRun run_with_gradients(const RunSetup& setup, const std::vector<std::vector<float>>& gradients) {
  WatchedRun run(setup);
  for (const int64_t step : {50, 100}) {
    for (size_t i = 0; i < gradients.size(); ++i)
      run.take(probe_of(step, "gradient", "h." + std::to_string(i) + ".w", gradients[i]));
    run.take(setup.compute == "fp16" ? fp16_step(step, 1.0) : healthy_step(step));
  }
  return run;
}

TEST(GradientUnderflow, IsFoundBeforeAndAfterTheCast) {
  // A third of normal values of size 2^-24 are below 2^-25: 0.383 of them, by the normal distribution.
  for (const auto& values : {normal(0x1p-24), flushed_below_fp16(normal(0x1p-24))}) {
    const WatchedRun run = run_with_gradients(kFp16, {values});
    const Finding finding = run.finding("gradient-underflow");
    EXPECT_EQ(finding.severity, Severity::Serious);
    EXPECT_EQ(finding.step, 50);
    EXPECT_EQ(finding.layer, "h.0.w");
    double share = 0.0;
    std::istringstream(finding.what) >> share;
    EXPECT_NEAR(share, 38.3, 3.0) << finding.what;
  }
}

TEST(GradientUnderflow, NamesTheLayersThatLoseMost) {
  const WatchedRun run = run_with_gradients(kFp16, {normal(0x1p-20), normal(0x1p-27), normal(0x1p-24)});
  EXPECT_EQ(run.finding("gradient-underflow").layer, "h.1.w");
}

TEST(GradientUnderflow, GradientsThatAreAllZeroAreLostBesideSmallOnes) {
  const std::vector<float> zeros(4096, 0.0f);
  EXPECT_EQ(run_with_gradients(kFp16, {zeros, normal(0x1p-22)}).severity("gradient-underflow"), "serious");
  EXPECT_EQ(run_with_gradients(kFp16, {zeros}).severity("gradient-underflow"), "serious");
  EXPECT_EQ(run_with_gradients(kFp16, {normal(0x1p-22), zeros}).finding("gradient-underflow").layer, "h.1.w");
}

TEST(GradientUnderflow, ZerosBesideLargeGradientsAreZeros) {
  std::vector<float> rows = normal(1.0);
  std::fill(rows.begin() + 100, rows.end(), 0.0f);  // an embedding of which few tokens were in the batch
  const std::vector<float> zeros(4096, 0.0f);
  EXPECT_TRUE(run_with_gradients(kFp16, {rows, zeros, normal(0x1p-8)}).findings().empty());
}

// An embedding under a low loss scale: nine rows of ten were not in the batch, and the others lie around
// 2^-16, where the distance to FP16's end, 9 binades, is six of their deviations.
TEST(GradientUnderflow, ZerosBesideSmallGradientsThatEndAboveFp16sEndAreZeros) {
  std::vector<float> rows = normal(1.5, 40'960);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = i % 10 == 0 ? std::exp2(rows[i] - 16.0f) : 0.0f;
  EXPECT_TRUE(run_with_gradients(kFp16, {rows}).findings().empty());
  // As wide as they are far: half of these values are lost, and more zeros than those cannot be told apart.
  std::vector<float> wide = normal(6.0, 40'960);
  for (float& value : wide) value = std::exp2(value - 25.0f);
  EXPECT_EQ(run_with_gradients(kFp16, {flushed_below_fp16(wide)}).severity("gradient-underflow"), "serious");
}

TEST(GradientUnderflow, IsNoneInBf16) {
  EXPECT_TRUE(run_with_gradients({.compute = "bf16"}, {normal(0x1p-30)}).findings().empty());
}

TEST(GradientUnderflow, OneSampleIsNotEnough) {
  WatchedRun run(kFp16);
  run.take(probe_of(50, "gradient", "w", normal(0x1p-24)));
  run.take(fp16_step(50, 1.0));
  run.take(probe_of(100, "gradient", "w", normal(0x1p-4)));
  run.take(fp16_step(100, 1.0));
  EXPECT_TRUE(run.findings().empty());
  run.take(probe_of(150, "gradient", "w", normal(0x1p-24)));
  run.take(fp16_step(150, 1.0));
  EXPECT_TRUE(run.findings().empty());
}

TEST(AccumulationRounding, FollowsFromTheDigitsOfTheSum) {
  const auto severity = [](const char* type, int64_t parts) {
    WatchedRun run({.compute = "bf16", .summed_parts = parts, .sum_type = type});
    run.take(healthy_step(1));
    return run.severity("accumulation-rounding");
  };
  EXPECT_EQ(severity("bf16", 32), "");
  EXPECT_EQ(severity("bf16", 64), "warning");
  EXPECT_EQ(severity("bf16", 256), "serious");
  EXPECT_EQ(severity("fp16", 256), "");
  EXPECT_EQ(severity("fp16", 2048), "serious");
  EXPECT_EQ(severity("fp32", 1 << 20), "");
  // 256 and one more in BF16 are 256: the bound is the format's.
  float sum = 0.0f;
  for (int i = 0; i < 1024; ++i) sum = decode_float(encode_float(sum + 1.0f, Format::BF16), Format::BF16);
  EXPECT_EQ(sum, 256.0f);
}

// As a Probe tells of a loop that calls loss.backward() itself: nobody has to say how many parts there are.
TEST(AccumulationRounding, IsToldByTheProbesOfGradients) {
  const auto found = [](const char* type, int64_t parts, bool logs_steps) {
    WatchedRun run({.compute = "bf16"});
    for (const int64_t step : {1, 50}) {
      ProbeRecord record = probe_of(step, "gradient", "h.0.w", normal(1.0));
      record.summed_parts = parts;
      record.sum_type = type;
      run.take(record);
      if (logs_steps) run.take(healthy_step(step));
    }
    return run;
  };
  for (const bool logs_steps : {false, true}) {
    EXPECT_EQ(found("bf16", 32, logs_steps).severity("accumulation-rounding"), "");
    const WatchedRun run = found("bf16", 1024, logs_steps);
    EXPECT_EQ(run.severity("accumulation-rounding"), "serious");
    EXPECT_EQ(run.finding("accumulation-rounding").step, 1);
    EXPECT_EQ(run.told("accumulation-rounding"), 1);
  }
  EXPECT_EQ(found("fp16", 256, true).severity("accumulation-rounding"), "");
  EXPECT_EQ(found("", 1, true).severity("accumulation-rounding"), "");
}

// Those that the steps name in which much was lost, and not one of the many before.
TEST(Findings, NameTheLayerWithTheLargestShares) {
  WatchedRun run({.compute = "fp8-delayed"});
  for (int64_t step = 1; step <= 60; ++step) {
    StepRecord record = healthy_step(step);
    const bool is_ill = step > 30;
    const std::string name = !is_ill || step % 5 == 0 ? "h.0.w" : "h.1.w";
    record.stalled_share = is_ill ? 0.9 : 0.01;
    record.saturated_share = is_ill ? 0.02 : 1e-6;
    record.vanished_share = is_ill ? 0.2 : 0.01;
    record.stalled_most = "s." + name, record.saturated_most = "f." + name,
    record.vanished_most = "v." + name;
    run.take(record);
  }
  EXPECT_EQ(run.finding("stale-amax").layer, "f.h.1.w");
  for (const auto& [code, layer] :
       {std::pair("stalled-weights", "s.h.1.w"), std::pair("fp8-saturating", "f.h.1.w"),
        std::pair("fp8-vanishing", "v.h.1.w")}) {
    EXPECT_EQ(run.severity(code).empty(), false) << code;
    EXPECT_EQ(run.finding(code).layer, layer) << code;
    EXPECT_NE(run.finding(code).evidence.find(std::string("Most in ") + layer), std::string::npos) << code;
  }
}

TEST(StalledWeights, ByTheMeanOfTwentySteps) {
  const auto severity = [](double share) {
    WatchedRun run({.compute = "bf16"});
    for (int64_t step = 1; step <= 30; ++step) {
      StepRecord record = healthy_step(step);
      record.stalled_share = share;
      run.take(record);
    }
    return run.severity("stalled-weights");
  };
  EXPECT_EQ(severity(0.2), "");
  EXPECT_EQ(severity(0.3), "warning");
  EXPECT_EQ(severity(0.9), "serious");
}

TEST(StalledWeights, FirstStepsSayNothing) {
  WatchedRun run({.compute = "bf16"});
  for (int64_t step = 1; step <= 40; ++step) {
    StepRecord record = healthy_step(step);
    if (step <= 2) record.stalled_share = 0.9;  // warm-up begins near a rate of 0
    run.take(record);
  }
  EXPECT_TRUE(run.findings().empty());
}

TEST(StalledWeights, EndOfAScheduleSaysNothing) {
  WatchedRun run({.compute = "fp32"});
  for (int64_t step = 1; step <= 100; ++step) {
    StepRecord record = healthy_step(step);
    if (step > 97) record.stalled_share = 1.0;  // the rate goes to 0
    run.take(record);
  }
  EXPECT_TRUE(run.findings().empty());
}

WatchedRun run_with_activations(const RunSetup& setup, const std::vector<float>& values) {
  WatchedRun run(setup);
  for (const int64_t step : {50, 100}) {
    run.take(probe_of(step, "activation", "h.1.mlp", values));
    run.take(healthy_step(step));
  }
  return run;
}

// A run of 100,000 steps of which each tenth is logged, at a rate that ends at zero as a cosine: in its last
// 20 records the rate is below 10^-5 of the highest, and updates are lost.
TEST(StalledWeights, TheEndOfALongCosineSaysNothing) {
  WatchedRun run({.compute = "bf16"});
  for (int64_t step = 10; step <= 100'000; step += 10) {
    StepRecord record = healthy_step(step);
    record.lr = 0.5e-3 * (1.0 + std::cos(3.14159265358979 * static_cast<double>(step) / 100'000.0));
    // Half a digit of a weight of 0.02 is 2^-31, and an update a third of the rate.
    record.stalled_share = std::min(1.0, 0x1p-31 / (record.lr / 3.0 + 1e-30));
    run.take(record);
  }
  EXPECT_TRUE(run.findings().empty());
}

TEST(OutlierChannels, AreFoundWhereOneScaleServesAll) {
  std::vector<float> values = normal(1.0);
  for (size_t i = 0; i < values.size(); i += 256) values[i] *= 0x1p16f;
  for (const char* compute : {"fp8-delayed", "fp8-current"}) {
    const WatchedRun run = run_with_activations({.compute = compute}, values);
    EXPECT_EQ(run.severity("outlier-channels"), "warning") << compute;
    EXPECT_EQ(run.finding("outlier-channels").layer, "h.1.mlp");
  }
  for (const char* compute : {"mxfp8", "fp8-block", "bf16"})
    EXPECT_TRUE(run_with_activations({.compute = compute}, values).findings().empty()) << compute;
}

TEST(OutlierChannels, NormalActivationsAndGelusHaveNone) {
  std::vector<float> gelu = normal(1.5);
  for (float& value : gelu) value *= 0.5f * static_cast<float>(std::erfc(-value / std::sqrt(2.0f)));
  std::vector<float> relu = normal(1.0);
  for (float& value : relu) value = std::max(value, 0.0f);
  std::vector<float> hundredfold = normal(1.0);
  hundredfold[5] = 100.0f;
  for (const auto& values : {normal(1.0), gelu, relu, hundredfold})
    EXPECT_TRUE(run_with_activations({.compute = "fp8-current"}, values).findings().empty());
}

TEST(OutlierChannels, LogitsAreNotCastToFp8) {
  std::vector<float> values = normal(1.0);
  for (size_t i = 0; i < values.size(); i += 2) values[i] = -1e9f;  // masked
  WatchedRun run({.compute = "fp8-current"});
  for (const int64_t step : {50, 100}) {
    run.take(probe_of(step, "activation", "h.1.attn" + std::string(ProbeRecord::kLogitsAfter), values));
    run.take(healthy_step(step));
  }
  EXPECT_TRUE(run.findings().empty());
}

WatchedRun run_with_saturation(const char* compute, const std::vector<double>& shares) {
  WatchedRun run({.compute = compute});
  for (size_t i = 0; i < shares.size(); ++i) {
    StepRecord record = healthy_step(static_cast<int64_t>(i) + 1);
    record.saturated_share = shares[i];
    record.vanished_share = 0.0;
    run.take(record);
  }
  return run;
}

TEST(Fp8Saturating, ByTheMeanOfTwentySteps) {
  EXPECT_EQ(run_with_saturation("fp8-delayed", std::vector<double>(40, 5e-4)).severity("fp8-saturating"), "");
  EXPECT_EQ(run_with_saturation("fp8-delayed", std::vector<double>(40, 2e-3)).severity("fp8-saturating"),
            "warning");
  EXPECT_EQ(run_with_saturation("fp8-delayed", std::vector<double>(40, 0.02)).severity("fp8-saturating"),
            "serious");
}

TEST(StaleAmax, IsAJumpUnderDelayedScaling) {
  std::vector<double> shares(40, 1e-6);
  shares.insert(shares.end(), 5, 0.02);
  const WatchedRun run = run_with_saturation("fp8-delayed", shares);
  EXPECT_EQ(run.first(), "stale-amax");
  EXPECT_EQ(run.finding("stale-amax").step, 41);
  EXPECT_EQ(run_with_saturation("fp8-current", shares).severity("stale-amax"), "");
  EXPECT_EQ(run_with_saturation("fp8-delayed", std::vector<double>(40, 0.02)).severity("stale-amax"), "");
}

TEST(Fp8Vanishing, ByTheMeanOfTwentySteps) {
  const auto severity = [](double share) {
    WatchedRun run({.compute = "fp8-current"});
    for (int64_t step = 1; step <= 30; ++step) {
      StepRecord record = healthy_step(step);
      record.saturated_share = 0.0;
      record.vanished_share = share;
      run.take(record);
    }
    return run.severity("fp8-vanishing");
  };
  EXPECT_EQ(severity(0.01), "");
  EXPECT_EQ(severity(0.1), "warning");
}

using RankLists = std::vector<std::vector<int64_t>>;

/// Of a run whose steps failed on these ranks each.
std::string failing(int64_t ranks, const RankLists& failed, const std::string& direction = "forward") {
  WatchedRun run({.compute = "fp16", .ranks = ranks});
  for (size_t i = 0; i < failed.size(); ++i) {
    CulpritRecord record = culprit_of(static_cast<int64_t>(i) + 1, "exp", "h.0.mlp", direction);
    record.ranks = failed[i];
    record.rank = failed[i].empty() ? 0 : failed[i].front();
    run.take(record);
  }
  return run.severity("rank-differs");
}

TEST(RankDiffers, IsOneRankThatFailsAlone) {
  EXPECT_EQ(failing(4, RankLists(5, {2})), "warning");
  EXPECT_EQ(failing(4, RankLists(4, {2})), "");
  EXPECT_EQ(failing(4, {{2}, {2}, {1}, {2}, {2}, {2}}), "");
  EXPECT_EQ(failing(4, RankLists(5, {2}), "backward"), "");  // a loss scale's
}

TEST(RankDiffers, IsNoneWhereOthersFailedInTheSameSteps) {
  EXPECT_EQ(failing(4, RankLists(8, {0, 1, 2, 3})), "");
  EXPECT_EQ(failing(4, {{2}, {2}, {1, 2}, {2}, {2}, {2}}), "");
  EXPECT_EQ(failing(4, RankLists(8)), "");  // a log of a version that did not tell them
}

// The odds that bad batches fall on the same rank n times: 2^4 = 16 and 2^6 = 64 are too few, 2^7 = 128
// enough; 3^4 = 81 and 3^5 = 243.
TEST(RankDiffers, NeedsMoreOfItTheFewerRanksThereAre) {
  EXPECT_EQ(failing(2, RankLists(7, {1})), "");
  EXPECT_EQ(failing(2, RankLists(8, {1})), "warning");
  EXPECT_EQ(failing(3, RankLists(5, {1})), "");
  EXPECT_EQ(failing(3, RankLists(6, {1})), "warning");
}

/// Of a run with these losses of its ranks in the steps that were looked at.
std::string with_losses(const std::vector<std::vector<double>>& looks) {
  WatchedRun run({.compute = "bf16", .ranks = std::ssize(looks.front())});
  for (size_t i = 0; i < looks.size(); ++i) {
    StepRecord record = healthy_step(50 * (static_cast<int64_t>(i) + 1));
    record.rank_losses = looks[i];
    run.take(record);
  }
  return run.severity("rank-differs");
}

TEST(RankDiffers, IsOneWhoseLossIsFarFromTheOthersFiveTimes) {
  const std::vector<double> ill = {2.4, 2.6, 24.0, 2.5}, low = {2.4, 2.6, 0.1, 2.5},
                            other = {24.0, 2.6, 2.4, 2.5}, well = {2.4, 2.6, 2.7, 2.5};
  EXPECT_EQ(with_losses({ill, ill, ill, ill, ill}), "warning");
  EXPECT_EQ(with_losses({low, low, low, low, low}), "warning");
  EXPECT_EQ(with_losses({well, well, ill, ill, ill, ill, ill}), "warning");
  EXPECT_EQ(with_losses({ill, ill, ill, ill}), "");
  EXPECT_EQ(with_losses({ill, ill, well, ill, ill}), "");
  EXPECT_EQ(with_losses({ill, ill, other, ill, ill}), "");
  EXPECT_EQ(with_losses({ill, ill, ill, ill, {kNan, 2.6, 24.0, 2.5}}), "");
  const std::vector<double> two_ill = {2.4, 24.0, 24.0, 2.5};
  EXPECT_EQ(with_losses({two_ill, two_ill, two_ill, two_ill, two_ill}), "");
}

TEST(RankDiffers, OfTwoNeedsAFactorOfAHundred) {
  const std::vector<double> ill = {2.5, 250.0}, far = {2.5, 240.0}, near_zero = {1e-9, 1e-3};
  EXPECT_EQ(with_losses({ill, ill, ill, ill, ill}), "warning");
  EXPECT_EQ(with_losses({far, far, far, far, far}), "");
  EXPECT_EQ(with_losses({near_zero, near_zero, near_zero, near_zero, near_zero}), "");
}

TEST(RankDiffers, HealthyRanksDoNot) {
  std::mt19937_64 bits(7);
  std::normal_distribution<double> noise(0.0, 0.3);
  for (const int64_t ranks : {2, 3, 4, 8, 64}) {
    std::vector<std::vector<double>> looks;
    for (int look = 0; look < 400; ++look) {
      std::vector<double> losses;
      // From 6 to 0.01, with the noise of small batches, which grows smaller with the loss.
      const double level = 0.01 + 6.0 * std::exp(-look / 60.0);
      for (int64_t rank = 0; rank < ranks; ++rank) losses.push_back(level * std::exp(noise(bits)));
      looks.push_back(losses);
    }
    EXPECT_EQ(with_losses(looks), "") << ranks;
  }
}

TEST(SumThatOverflows, HasARemedyOfItsOwn) {
  CulpritRecord record = culprit_of(3, std::string(CulpritRecord::kSumOverRanks), "head.weight", "backward");
  record.output = "FP16 [8]: not finite";
  {
    WatchedRun run({.compute = "bf16", .ranks = 2});
    run.take(record);
    EXPECT_EQ(run.severity("nan-producer"), "serious");
    const Finding finding = run.finding("nan-producer");
    EXPECT_NE(finding.what.find("The sum over ranks is too large for the gradients of head.weight"),
              std::string::npos)
        << finding.what;
    EXPECT_NE(finding.remedy.find("run.reduction=fp32"), std::string::npos) << finding.remedy;
    EXPECT_EQ(finding.layer, "head.weight");
  }
  {
    WatchedRun run({.compute = "fp16", .ranks = 2});  // whose loss scale is lowered until it fits
    run.take(record);
    EXPECT_EQ(run.severity("nan-producer"), "note");
    EXPECT_NE(run.finding("nan-producer").remedy.find("run.reduction=fp32"), std::string::npos);
  }
  record.op = CulpritRecord::kSumOfBatches;
  record.output = "FP32 [8]: largest magnitude 3e+19, whose square FP32 does not hold";
  WatchedRun run({.compute = "fp32"});
  run.take(record);
  EXPECT_EQ(run.severity("nan-producer"), "serious");
  EXPECT_NE(run.finding("nan-producer").remedy.find("learning rate"), std::string::npos);
}

TEST(LossScale, FixedAtItsFloorIsFineUntilItOverflowsThere) {
  RunSetup setup = kFp16;
  setup.loss_scale_floor = 1.0;
  WatchedRun run(setup);
  for (int64_t step = 1; step <= 100; ++step) run.take(fp16_step(step, 1.0, step == 50));
  EXPECT_EQ(run.above_note(), "");
  run.take(fp16_step(101, 1.0, true));
  run.take(fp16_step(102, 1.0, true));
  EXPECT_EQ(run.severity("scale-at-floor"), "serious");
  EXPECT_EQ(run.finding("scale-at-floor").step, 101);
  EXPECT_EQ(run.finding("scale-at-floor").layer, "h.0.w");
}

TEST(LossScale, FallingFarIsSeriousAndNamesTheCulprit) {
  WatchedRun run(kFp16);
  for (int64_t step = 1; step <= 100; ++step) run.take(fp16_step(step, 0x1p14));
  for (int64_t step = 101; step <= 105; ++step)
    run.take(fp16_step(step, std::ldexp(0x1p14, 101 - step), true));
  EXPECT_EQ(run.severity("scale-falling"), "");  // four halvings are seen
  run.take(culprit_of(106, "mm", "h.2.mlp", "backward"));
  run.take(fp16_step(106, 0x1p9, true));
  EXPECT_EQ(run.severity("scale-falling"), "warning");
  EXPECT_EQ(run.finding("scale-falling").layer, "h.2.mlp");
  EXPECT_EQ(run.finding("scale-falling").op, "mm");
  for (int64_t step = 107; step <= 116; ++step)
    run.take(fp16_step(step, std::ldexp(0x1p14, 101 - step), true));
  EXPECT_EQ(run.severity("scale-falling"), "serious");
  EXPECT_EQ(run.finding("scale-falling").step, 101);
  EXPECT_EQ(run.told("scale-falling"), 2);
}

TEST(LossScale, TenHalvingsAreSeriousAlsoFarAboveOne) {
  WatchedRun run(kFp16);
  run.take(fp16_step(1, 0x1p30));
  for (int64_t step = 2; step <= 11; ++step) run.take(fp16_step(step, std::ldexp(0x1p30, 2 - step), true));
  EXPECT_EQ(run.severity("scale-falling"), "warning");
  run.take(fp16_step(12, 0x1p20, true));
  EXPECT_EQ(run.severity("scale-falling"), "serious");
}

TEST(LossScale, StartThatIsFarTooHighIsAWarningAndNoSpiral) {
  WatchedRun run(kFp16);
  int64_t step = 1;
  for (double scale = 0x1p50; scale > 0x1p14; scale /= 2) run.take(fp16_step(step++, scale, true));
  for (int i = 0; i < 100; ++i) run.take(fp16_step(step++, 0x1p14));
  EXPECT_EQ(run.first(), "scale-falling");
  EXPECT_EQ(run.severity("scale-falling"), "warning");
  EXPECT_NE(run.finding("scale-falling").remedy.find("65536"), std::string::npos);
  EXPECT_EQ(run.severity("skip-spiral"), "");
}

TEST(LossScale, GradientsThatAreNeverFiniteAreNoSearch) {
  WatchedRun run(kFp16);
  int64_t step = 1;
  for (double scale = 0x1p16; scale >= 0x1p-24; scale /= 2) run.take(fp16_step(step++, scale, true));
  run.take(fp16_step(step++, 0x1p-24, true));
  EXPECT_EQ(run.severity("scale-falling"), "serious");
  EXPECT_EQ(run.severity("skip-spiral"), "serious");
  EXPECT_EQ(run.severity("scale-at-floor"), "serious");
  EXPECT_EQ(run.first(), "scale-at-floor");
}

TEST(SkipSpiral, IsAShareOfTheLastSteps) {
  const auto severity = [](int64_t every) {
    WatchedRun run(kFp16);
    for (int64_t step = 1; step <= 64; ++step)
      run.take(fp16_step(step, step % every == 0 ? 0x1p17 : 0x1p16, step % every == 0));
    return run.severity("skip-spiral");
  };
  EXPECT_EQ(severity(2), "serious");
  EXPECT_EQ(severity(4), "warning");
  EXPECT_EQ(severity(10), "");
}

TEST(SkipSpiral, WithoutALossScaleOneSkipIsANoteAndManyAreSerious) {
  WatchedRun run({.compute = "bf16"});
  StepRecord skipped = healthy_step(20);
  skipped.skipped = true;
  for (int64_t step = 1; step < 20; ++step) run.take(healthy_step(step));
  run.take(skipped);
  EXPECT_EQ(run.severity("skip-spiral"), "note");
  for (int64_t step = 21; step <= 60; ++step) {
    skipped.step = step;
    run.take(skipped);
  }
  EXPECT_EQ(run.severity("skip-spiral"), "serious");
}

TEST(LossNotFinite, OneIsAWarningThreeInARowAreSerious) {
  WatchedRun run({.compute = "bf16"});
  for (int64_t step = 1; step <= 10; ++step) run.take(healthy_step(step));
  EXPECT_EQ(run.severity("loss-not-finite"), "");
  StepRecord lost = healthy_step(11);
  lost.loss = kNan;
  run.take(lost);
  EXPECT_EQ(run.severity("loss-not-finite"), "warning");
  for (int64_t step = 12; step <= 14; ++step) {
    lost.step = step;
    run.take(lost);
  }
  EXPECT_EQ(run.severity("loss-not-finite"), "serious");
  EXPECT_EQ(run.finding("loss-not-finite").step, 11);
  EXPECT_EQ(run.told("loss-not-finite"), 2);
}

TEST(LossSpike, IsHighAndLasts) {
  const auto severity = [](int64_t high_steps, double by) {
    WatchedRun run({.compute = "bf16"});
    for (int64_t step = 1; step <= 200; ++step) {
      StepRecord record = healthy_step(step);
      if (step > 100 && step <= 100 + high_steps) record.loss += by;
      run.take(record);
    }
    return run.severity("loss-spike");
  };
  EXPECT_EQ(severity(1, 5.0), "");
  EXPECT_EQ(severity(5, 5.0), "warning");
  EXPECT_EQ(severity(60, 5.0), "serious");
  EXPECT_EQ(severity(60, 0.3), "");
}

TEST(LossSpike, MustBeAboveTheNoiseAndWorthMentioning) {
  const auto severity = [](double noise, double by) {
    std::mt19937_64 bits(1);
    std::normal_distribution<double> distribution(0.0, noise);
    WatchedRun run({.compute = "bf16"});
    for (int64_t step = 1; step <= 200; ++step) {
      StepRecord record = testing::plain_record(step);
      record.loss = 2.0 + distribution(bits) + (step > 100 && step <= 110 ? by : 0.0);
      run.take(record);
    }
    return run.severity("loss-spike");
  };
  EXPECT_EQ(severity(0.3, 1.2), "");    // four deviations, though more than half of the loss
  EXPECT_EQ(severity(0.001, 0.1), "");  // a hundred deviations, but a twentieth of the loss
  EXPECT_EQ(severity(0.001, 1.0), "warning");
}

TEST(LossSpike, WhatWasLearnedToZeroHasNone) {
  WatchedRun run({.compute = "fp32"});
  for (int64_t step = 1; step <= 400; ++step) {
    StepRecord record = testing::plain_record(step);
    record.loss = step < 100 ? 5.0 * std::exp(-static_cast<double>(step) / 10.0) : step > 300 ? 1e-6 : 0.0;
    run.take(record);
  }
  EXPECT_TRUE(run.findings().empty());
  for (int64_t step = 401; step <= 405; ++step) {
    StepRecord record = testing::plain_record(step);
    record.loss = 1.0;
    run.take(record);
  }
  EXPECT_EQ(run.severity("loss-spike"), "warning");
}

TEST(LossSpike, NoiseWithHeavyTailsIsNone) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    std::mt19937_64 bits(seed);
    std::student_t_distribution<double> noise(3.0);
    WatchedRun run({.compute = "bf16"});
    for (int64_t step = 1; step <= 2000; ++step) {
      StepRecord record = testing::plain_record(step);
      record.loss = 3.0 + 0.1 * noise(bits);
      run.take(record);
    }
    EXPECT_TRUE(run.findings().empty()) << seed;
  }
}

TEST(FindingWatch, TellsEachOnceAndAgainOnlyIfItBecomesWorse) {
  WatchedRun run({.compute = "bf16"});
  for (int64_t step = 1; step <= 60; ++step) {
    StepRecord record = healthy_step(step);
    record.stalled_share = step < 30 ? 0.3 : 0.95;
    run.take(record);
  }
  EXPECT_EQ(run.told("stalled-weights"), 2);
  EXPECT_EQ(run.finding("stalled-weights").step, 1);
}

TEST(FindingWatch, TakesWhatWasFoundWhileTheRunWentOn) {
  WatchedRun run({.compute = "bf16"});
  run.take(FindingRecord{.step = 5, .seconds = 1.0, .finding = testing::some_finding(4)});
  run.take(FindingRecord{.step = 6, .seconds = 1.0, .finding = testing::some_finding(6)});
  EXPECT_EQ(run.told("gradient-underflow"), 1);
  EXPECT_EQ(run.finding("gradient-underflow").step, 4);
}

TEST(FindingWatch, MostSeriousFirstAndCausesBeforeWhatFollows) {
  WatchedRun run(kFp16);
  StepRecord lost = fp16_step(1, 0x1p-24, true);
  for (int64_t step = 1; step <= 40; ++step) {
    lost.step = step;
    lost.loss = kNan;
    run.take(culprit_of(step, "exp", "h.0.mlp"));
    run.take(lost);
  }
  EXPECT_EQ(run.first(), "nan-producer");
  EXPECT_EQ(run.findings().back().code, "loss-not-finite");
  EXPECT_GE(run.findings().size(), 4u);
}

TEST(Findings, EveryCodeHasASectionInThePageAndNoOther) {
  std::ifstream page(HALFSTEP_SOURCE_DIR "/docs/findings.md");
  std::set<std::string> sections;
  for (std::string line; std::getline(page, line);)
    if (line.starts_with("## `") && line.ends_with('`')) sections.insert(line.substr(4, line.size() - 5));
  const auto codes = finding_codes();
  EXPECT_EQ(sections, std::set<std::string>(codes.begin(), codes.end()));
}

TEST(RunSetup, FollowsTheConfiguration) {
  RunConfig config;
  config.precision.compute = "fp16";
  config.precision.loss_scale.floor = 0.5;
  config.train.accumulation = 4096;
  EXPECT_EQ(run_setup(config).loss_scale_floor, 0.5);
  EXPECT_EQ(run_setup(config).compute, "fp16");
  EXPECT_EQ(run_setup(config).sum_type, "fp32");  // of micro-batches
  config.run.reduction = "bf16";
  EXPECT_EQ(run_setup(config, 64).sum_type, "bf16");
  EXPECT_EQ(run_setup(config, 64).summed_parts, 64);
}

}  // namespace
}  // namespace halfstep
