#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <halfstep/trainer.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/python.h"
#include "support/scratch.h"
#include "train/trainer_fixture.h"

namespace halfstep {
namespace {

using nlohmann::json;
using testing::Counter;
using testing::ScratchFolder;
using testing::TrainerTest;
using testing::write_text;

TEST_F(TrainerTest, RunWritesLogCheckpointsAndAModelThatOpens) {
  Counter counter;
  const RunEnd end = run(config(), "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::Done);
  EXPECT_EQ(end.step, 8);
  EXPECT_EQ(counter.steps, 8);
  EXPECT_EQ(counter.evaluations, 3);  // before the first step, after 4 and after the last
  EXPECT_EQ(counter.samples.size(), 1U);
  EXPECT_EQ(counter.ends, 1);
  EXPECT_EQ(counter.plan.items_per_step, 2 * 2 * 16);
  EXPECT_EQ(checkpoint_steps(checkpoints("run")), (std::vector<int64_t>{3, 6, 8}));
  const auto model = load_pretrained(folder_ / "run/model");
  EXPECT_EQ(model->vocabulary(), 256);

  std::map<std::string, int> kinds;
  for (const json& record : log("run")) ++kinds[record.at("kind")];
  EXPECT_EQ(kinds["step"], 8);
  EXPECT_EQ(kinds["evaluation"], 3);
  EXPECT_EQ(kinds["sample"], 1);
  EXPECT_EQ(kinds["end"], 1);
}

TEST_F(TrainerTest, StoppedAndResumedRunEndsWithTheBitsOfAnUninterruptedOne) {
  for (const std::string precision : {"fp32", "bf16", "fp16"}) {
    std::vector<std::string> set = {"precision.compute=" + precision};
    if (precision == "fp16") set.push_back("precision.loss_scale.growth_interval=2");
    Counter uninterrupted, first(2), second(5), third;
    run(config(set), precision + "-whole", uninterrupted);
    EXPECT_EQ(run(config(set), precision + "-parts", first).outcome, RunOutcome::Interrupted);
    EXPECT_EQ(run(config(set), precision + "-parts", second).step, 5);
    EXPECT_EQ(run(config(set), precision + "-parts", third).outcome, RunOutcome::Done);
    EXPECT_EQ(third.steps, 3);
    EXPECT_EQ(last_state(precision + "-parts"), last_state(precision + "-whole")) << precision;

    std::vector<double> losses[2];
    for (int i = 0; i < 2; ++i)
      for (const json& record : log(precision + (i == 0 ? "-whole" : "-parts")))
        if (record.at("kind") == "step") losses[i].push_back(record.at("loss"));
    EXPECT_EQ(losses[0], losses[1]) << precision;
  }
}

TEST_F(TrainerTest, FinishedRunIsNotTrainedFurther) {
  Counter first, again;
  run(config(), "run", first);
  EXPECT_EQ(run(config(), "run", again).outcome, RunOutcome::Done);
  EXPECT_EQ(again.steps, 0);
}

TEST_F(TrainerTest, ResumeCanBeForbiddenOrDemanded) {
  Counter counter;
  EXPECT_THROW(run(config({"checkpoint.resume=must", "run.folder=x"}), "run", counter), Error);
  run(config(), "run", counter);
  EXPECT_THROW(run(config({"checkpoint.resume=never"}), "run", counter), Error);
}

TEST_F(TrainerTest, ChangedConfigurationIsTold) {
  Counter first(2), second;
  run(config(), "run", first);
  run(config({"optimizer.lr=0.5"}), "run", second);
  const auto told = [&](const std::string& text) {
    return std::any_of(second.notes.begin(), second.notes.end(),
                       [&](const std::string& note) { return note.find(text) != std::string::npos; });
  };
  EXPECT_TRUE(told("optimizer.lr is now 0.5, was 3e-4"));
  EXPECT_TRUE(told("resumed after step 2"));
}

// On a processor without FP16, eight products by LibTorch's emulation take half a minute.
TEST_F(TrainerTest, ToMeasureThePeakTakesLessThanSeconds) {
  const int threads = at::get_num_threads();
  const auto begin = std::chrono::steady_clock::now();
  // Measured anew for each number of threads; no other test has three.
  const Trainer trainer(config({"precision.compute=fp16", "train.threads=3"}), folder_ / "run");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  at::set_num_threads(threads);
}

TEST_F(TrainerTest, RunThatOnlySkipsEndsAsDiverged) {
  // A loss scale of 2^126 in FP16 that may not fall makes every gradient infinite.
  Counter counter;
  const RunEnd end = run(config({"precision.compute=fp16", "precision.loss_scale.initial=8.5e37",
                                 "precision.loss_scale.backoff_factor=0.999",
                                 "precision.loss_scale.max_consecutive_skips=3", "train.sample_every=0"}),
                         "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::Diverged);
  EXPECT_EQ(counter.skipped, 3);
  EXPECT_EQ(log("run").back().at("outcome"), "diverged");
  EXPECT_FALSE(end.why.empty());
}

TEST_F(TrainerTest, AccumulatedStepHasTheLossOfItsMicroBatches) {
  // Two batches of 2 and one of 4 hold the same sequences; without dropout the mean loss is the same.
  Counter parts, whole;
  const std::vector<std::string> shared = {"model.dropout=0", "train.steps=1", "train.evaluate_every=0",
                                           "train.sample_every=0"};
  auto two = shared, one = shared;
  one.insert(one.end(), {"data.batch_size=4", "train.accumulation=1"});
  run(config(two), "two", parts);
  run(config(one), "one", whole);
  const double a = log("two")[1].at("loss"), b = log("one")[1].at("loss");
  EXPECT_NEAR(a, b, 1e-6 * b);  // sums of 64 FP32 losses in another order
}

// Two witnesses: the norm that the log has, and a run with another loss scale.
TEST_F(TrainerTest, HistogramsOfGradientsAreWithoutTheLossScale) {
  for (const char* accumulation : {"1", "2"}) {
    for (const char* loss_scale : {"16", "1024"}) {
      const std::string name = std::string("scaled by ") + loss_scale + ", " + accumulation;
      Counter counter;
      run(config({"precision.compute=fp16", std::string("precision.loss_scale.initial=") + loss_scale,
                  "train.steps=1", "train.evaluate_every=1", "train.sample_every=0", "log.tensorboard=true",
                  std::string("train.accumulation=") + accumulation}),
          name, counter);
      ASSERT_EQ(counter.skipped, 0);
      const json events =
          testing::ask_python("tests/log/log_readers.py", {{"events", (folder_ / name).string()}});
      double sum_of_squares = 0;
      for (const auto& [tag, histograms] : events.at("histograms").items()) {
        if (!tag.starts_with("gradients/")) continue;
        const std::string hex = histograms.at(0).at("summary").at(4);
        sum_of_squares += std::strtod(hex.c_str(), nullptr);
      }
      const auto records = log(name);
      const auto step = std::find_if(records.begin(), records.end(),
                                     [](const json& record) { return record.contains("grad_norm"); });
      ASSERT_NE(step, records.end());
      const double norm = step->at("grad_norm");
      EXPECT_NEAR(std::sqrt(sum_of_squares), norm, 1e-5 * norm) << name;  // sums in FP64 and in FP32
    }
  }
}

TEST_F(TrainerTest, EstimateWritesNoLogAndNoCheckpoint) {
  Trainer trainer(config(), folder_ / "run");
  const RunEstimate estimate = trainer.estimate();
  EXPECT_GT(estimate.seconds_per_step, 0);
  EXPECT_GE(estimate.total_seconds, 8 * estimate.seconds_per_step);
  EXPECT_GT(estimate.checkpoint_bytes, trainer.plan().parameters * 12);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/log.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/checkpoints"));
}

TEST_F(TrainerTest, TraceIsJsonWithOperations) {
  Counter counter;
  run(config({"log.trace_steps=1", "log.tensorboard=true"}), "run", counter);
  std::ifstream file(folder_ / "run/trace.json");
  const json trace = json::parse(file);
  int products = 0;
  for (const json& event : trace.at("traceEvents"))
    if (event.value("name", "") == "aten::addmm") ++products;
  EXPECT_GT(products, 0);
}

TEST_F(TrainerTest, UnknownOperationIsRefusedBeforeAnyStep) {
  EXPECT_THROW(Trainer(config({"precision.compute=bf16", "precision.ops.softmacks=low"}), folder_ / "run"),
               Error);
}

TEST_F(TrainerTest, LlamaTrainsToo) {
  Counter counter;
  const RunEnd end = run(config({"model.kind=llama", "train.recompute_blocks=true"}), "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::Done);
}

}  // namespace
}  // namespace halfstep
