// A corpus, a configuration over it, and somebody who watches.
#pragma once

#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/trainer.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "support/scratch.h"

namespace halfstep::testing {

using nlohmann::json;

/// Counts what it is told; asks the run to stop after a step.
class Counter : public RunWatcher {
 public:
  explicit Counter(int64_t stop_after = -1) : stop_after_(stop_after) {}
  void begin(const RunPlan& given) override { plan = given; }
  void step(const StepRecord& record) override {
    ++steps;
    if (record.skipped) ++skipped;
    if (record.step == stop_after_) stop = true;
  }
  void evaluation(const EvaluationRecord&) override { ++evaluations; }
  void sample(const SampleRecord& record) override { samples.push_back(record.text); }
  void note(int64_t, std::string_view text) override { notes.emplace_back(text); }
  void end(const RunEnd&) override { ++ends; }

  RunPlan plan;
  int64_t steps = 0, skipped = 0, evaluations = 0, ends = 0;
  std::vector<std::string> samples, notes;
  std::atomic<bool> stop = false;

 private:
  int64_t stop_after_;
};

/// A corpus, and a configuration over it that has everything on: dropout, accumulation, evaluation, samples.
class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    std::string text;
    for (int line = 0; line < 400; ++line) text += "line " + std::to_string(line * line) + " of the corpus\n";
    write_text(folder_ / "corpus.txt", text);
  }

  ResolvedConfig config(std::vector<std::string> set = {}) const {
    std::vector<std::string> all = {"model.kind=gpt2",
                                    "model.layers=1",
                                    "model.width=16",
                                    "model.heads=2",
                                    "model.dropout=0.1",
                                    "data.train=" + (folder_ / "corpus.txt").string(),
                                    "data.validation_fraction=0.1",
                                    "data.sequence_length=16",
                                    "data.batch_size=2",
                                    "train.steps=8",
                                    "train.accumulation=2",
                                    "train.evaluate_every=4",
                                    "train.evaluate_batches=2",
                                    "train.sample_every=8",
                                    "train.sample_tokens=5",
                                    "checkpoint.every=3",
                                    "checkpoint.keep_last=0",
                                    "optimizer.clip_norm=1"};
    all.insert(all.end(), set.begin(), set.end());
    return resolve_config({.set = all});
  }

  RunEnd run(const ResolvedConfig& resolved, const std::string& name, Counter& counter,
             TrainerOptions options = {}) const {
    Trainer trainer(resolved, folder_ / name, options);
    return trainer.run(counter, counter.stop);
  }

  std::filesystem::path checkpoints(const std::string& name) const { return folder_ / name / "checkpoints"; }

  /// Every tensor and number of a run's last checkpoint but the fingerprint.
  std::map<std::string, std::string> last_state(const std::string& name) const {
    const auto summary = summarize_checkpoint(checkpoints(name), checkpoint_steps(checkpoints(name)).back());
    std::map<std::string, std::string> state;
    for (const auto& part : summary.parts) {
      for (const auto& tensor : part.tensors) state[part.name + "/" + tensor.name] = tensor.sha256;
      for (const auto& [key, value] : part.values) state[part.name + "/" + key] = value;
    }
    return state;
  }

  std::vector<json> log(const std::string& name) const {
    std::vector<json> records;
    std::ifstream file(folder_ / name / "log.jsonl");
    for (std::string line; std::getline(file, line);) records.push_back(json::parse(line));
    return records;
  }

  ScratchFolder folder_;
};

}  // namespace halfstep::testing
