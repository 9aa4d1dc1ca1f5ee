// Illnesses of precision, planted one at a time (examples/support/illnesses.cpp): the right finding comes
// first, with layer and operation, and its remedy makes the run well. Healthy runs have no finding.
#include <halfstep/findings.h>
#include <halfstep/probe.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>

#include "../examples/support/illnesses.h"
#include "support/any_machine.h"
#include "trainer_fixture.h"

void PrintTo(const Illness& illness, std::ostream* out) { *out << illness.name; }

namespace halfstep::testing {
namespace {

struct Diagnosis {
  std::string code{}, severity{}, layer{}, op{}, all{};
};

/// The first finding of a run that is more than a note, as `halfstep doctor` orders them.
Diagnosis first_of(const std::vector<json>& log) {
  const auto rank_of = [](const Diagnosis& finding) {
    const auto codes = finding_codes();
    return std::pair(finding.severity == "serious" ? 0 : 1,
                     std::ranges::find(codes, finding.code) - codes.begin());
  };
  Diagnosis first;
  std::string all;
  for (const json& line : log) {
    if (line["kind"] != "finding") continue;
    const Diagnosis found{.code = line["code"],
                          .severity = line["severity"],
                          .layer = line.value("layer", ""),
                          .op = line.value("op", "")};
    all += "\n  " + line.dump();
    if (found.severity == "note") continue;
    if (first.code.empty() || rank_of(found) < rank_of(first)) first = found;
  }
  first.all = all;
  return first;
}

class PlantedIllness : public TrainerTest, public ::testing::WithParamInterface<Illness> {};

TEST_P(PlantedIllness, IsFoundFirstAndTheRemedyMakesTheRunWell) {
  const Illness& illness = GetParam();
  illness.train(folder_ / "ill", /*with_remedy=*/false);
  const Diagnosis ill = first_of(log("ill"));
  EXPECT_EQ(ill.code, illness.code) << ill.all;
  EXPECT_EQ(ill.layer, illness.layer) << ill.all;
  EXPECT_EQ(ill.op, illness.op) << ill.all;
  illness.train(folder_ / "well", /*with_remedy=*/true);
  const Diagnosis well = first_of(log("well"));
  EXPECT_EQ(well.code, "") << well.all;
}

INSTANTIATE_TEST_SUITE_P(All, PlantedIllness, ::testing::ValuesIn(illnesses()), [](const auto& given) {
  std::string name = given.param.name;
  std::ranges::replace(name, '-', '_');
  return name;
});

class Illnesses : public TrainerTest {};

TEST_F(Illnesses, HaveNamesOfTheirOwnAndCodesThatThereAre) {
  std::set<std::string> names;
  for (const Illness& each : illnesses()) {
    EXPECT_TRUE(names.insert(each.name).second) << each.name;
    EXPECT_NE(std::ranges::find(finding_codes(), each.code), finding_codes().end()) << each.code;
  }
  EXPECT_GE(names.size(), 13u);
}

/// The sum of a step's gradients of last.weight, as the optimizer would take it.
at::Tensor summed_gradient(bool in_bf16) {
  Patient model;
  MixedPrecision mp(
      Precision::bf16(), model,
      {.autocast = kAnyMachine, .accumulation = in_bf16 ? Accumulation::None : Accumulation::Fp32});
  for (int64_t i = 0; i < kMicroBatches; ++i) {
    const at::Tensor loss = mp.forward([&] { return model.loss_of(micro_batch(1, i)); }) / kMicroBatches;
    if (in_bf16)
      loss.backward();
    else
      mp.backward(loss);
  }
  mp.close_sum();
  for (const Param& param : mp.params())
    if (param.name == "last.weight") return param.working.grad().to(at::kDouble);
  return {};
}

// The same micro-batches, each with a gradient of its own, added in FP64. What each of them is rounded to
// before the sum is the same in all three.
TEST_F(Illnesses, ASumInBf16LosesMostOfTheGradient) {
  Patient model;
  MixedPrecision mp(Precision::bf16(), model, {.autocast = kAnyMachine});
  const at::Tensor& weight = model.last->weight;
  at::Tensor exact = torch::zeros({Patient::kWidth, Patient::kWidth}, at::kDouble),
             magnitudes = exact.clone();
  for (int64_t i = 0; i < kMicroBatches; ++i) {
    at::Tensor loss = mp.forward([&] { return model.loss_of(micro_batch(1, i)); }) / kMicroBatches;
    loss.backward();
    const at::Tensor part = weight.grad().to(at::kDouble);
    exact += part;
    magnitudes += part.abs();
    for (const at::Tensor& parameter : model.parameters()) parameter.mutable_grad().reset();
  }
  // An addition in FP32 rounds by 2^-24 of a partial sum, which is at most the sum of the magnitudes.
  const at::Tensor high_error = (summed_gradient(/*in_bf16=*/false) - exact).abs();
  EXPECT_TRUE(high_error.le(kMicroBatches * 0x1p-24 * magnitudes).all().item<bool>());
  // Parts of one sign and size stop at 256 of 1,024: a quarter. They differ in size, and the larger ones are
  // taken up for longer.
  const double kept = (summed_gradient(/*in_bf16=*/true).norm() / exact.norm()).item<double>();
  RecordProperty("kept", std::to_string(kept));
  EXPECT_GT(kept, 0.25);
  EXPECT_LT(kept, 0.75);
}

TEST_F(Illnesses, HealthyRunsHaveNoFinding) {
  for (const std::string precision : {"bf16", "fp16", "fp8-delayed", "fp8-current", "mxfp8"})
    for (const int seed : {1, 2}) {
      Counter counter;
      const std::string name = detail::concat("healthy-", precision, "-", seed);
      (void)run(config({"train.steps=60", "watch.every=5", "train.evaluate_every=0", "model.width=32",
                        "precision.compute=" + precision, detail::concat("train.seed=", seed)}),
                name, counter);
      const Diagnosis found = first_of(log(name));
      EXPECT_EQ(found.code, "") << name << found.all;
    }
}

}  // namespace
}  // namespace halfstep::testing
