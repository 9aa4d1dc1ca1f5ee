// A Trainer over somebody else's Task, which may throw, remember and draw as it likes.
#include <halfstep/task.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "trainer_fixture.h"

namespace halfstep::testing {
namespace {

/// What a task does wrong, and when.
struct Mishap {
  int64_t in_batch = -1;        // take_batch throws after it has counted this one
  int64_t in_evaluation = -1;   // evaluate throws at this call, counted from 0
  int64_t spike_from = -1;      // losses are too large from this batch on, for a while
  int64_t infinite_batch = -1;  // has an Inf in it
  bool unsavable = false;       // a tensor of a type that no checkpoint holds
};

/// Learns the mean of drawn numbers. Draws its batches from LibTorch's default generator, and remembers how
/// often it was asked for a loss.
class Numbers : public Task {
 public:
  explicit Numbers(Mishap mishap) : mishap_(mishap) {}

  torch::nn::Module& model() override { return *model_; }
  void take_batch() override {
    ++taken_;
    if (taken_ == mishap_.in_batch) throw std::runtime_error("the batch cannot be read");
    batch_ = torch::randn({16, 4});
    if (taken_ == mishap_.infinite_batch) batch_[3][2] = std::numeric_limits<float>::infinity();
    first_numbers.push_back(batch_[0][0].item<float>());
  }
  at::Tensor loss() override {
    ++remembered_;
    const bool spike =
        mishap_.spike_from >= 0 && taken_ >= mishap_.spike_from && taken_ < mishap_.spike_from + 80;
    const at::Tensor loss = (model_->forward(batch_ + carried_) - 1).square().mean() * (spike ? 1e6 : 1);
    carried_.mul_(0.5).add_(0.01);  // in place, as a recurrent state may be
    return loss;
  }
  Score evaluate(const MixedPrecision& precision) override {
    if (evaluations_++ == mishap_.in_evaluation) throw std::runtime_error("the held-out data cannot be read");
    return {
        .loss = precision.forward([&] { return model_->forward(torch::ones({1, 4})).mean().item<double>(); }),
        .count = 1};
  }
  StateDict state_dict() const override {
    StateDict state;
    state.set("taken", taken_);
    state.set("remembered", remembered_);
    state.set("carried", carried_);
    if (mishap_.unsavable) state.set("spectrum", torch::ones({2}, torch::kComplexDouble));
    return state;
  }
  void load_state_dict(const StateDict& saved) override {
    taken_ = saved.integer("taken");
    remembered_ = saved.integer("remembered");
    carried_.copy_(saved.tensor("carried"));
  }
  void move_data_to(const StateDict& later) override { taken_ = later.integer("taken"); }

  int64_t taken() const { return taken_; }
  int64_t remembered() const { return remembered_; }
  std::vector<float> first_numbers;

 private:
  Mishap mishap_;
  torch::nn::Linear model_ = [] {
    torch::manual_seed(3);
    return torch::nn::Linear(4, 1);
  }();
  at::Tensor batch_;
  at::Tensor carried_ = torch::zeros({4});
  int64_t taken_ = 0, remembered_ = 0, evaluations_ = 0;
};

class OwnTask : public TrainerTest {
 protected:
  static ResolvedConfig own(std::vector<std::string> set = {}) {
    std::vector<std::string> all = {"model.kind=own",     "train.steps=8",          "train.evaluate_every=4",
                                    "checkpoint.every=3", "checkpoint.keep_last=0", "optimizer.lr=1e-2"};
    all.insert(all.end(), set.begin(), set.end());
    return resolve_config({.set = all});
  }
  RunEnd run_own(const std::string& name, Mishap mishap, const ResolvedConfig& config, Counter& counter) {
    auto task = std::make_unique<Numbers>(mishap);
    task_ = task.get();
    trainer_.emplace(std::move(task), config, folder_ / name);
    return trainer_->run(counter, counter.stop);
  }
  std::vector<int64_t> logged(const std::string& name, const std::string& kind) const {
    std::vector<int64_t> steps;
    for (const json& record : log(name))
      if (record["kind"] == kind) steps.push_back(record["step"].get<int64_t>());
    return steps;
  }
  Numbers* task_ = nullptr;
  std::optional<Trainer> trainer_;
};

TEST_F(OwnTask, ABatchThatCannotBeReadIsTakenAgainAfterTheResume) {
  Counter counter;
  (void)run_own("calm", {}, own(), counter);
  EXPECT_THROW((void)run_own("run", {.in_batch = 6}, own(), counter), std::runtime_error);
  trainer_.reset();
  EXPECT_EQ(run_own("run", {}, own(), counter).outcome, RunOutcome::Done);
  trainer_.reset();
  EXPECT_EQ(last_state("run"), last_state("calm"));
}

TEST_F(OwnTask, AnEvaluationThatFailsLeavesNoGapInTheLogAndIsDoneAfterTheResume) {
  Counter counter;
  for (const int64_t call : {1, 2}) {  // after step 4, and after the last, 8
    const std::string name = "run" + std::to_string(call);
    EXPECT_THROW((void)run_own(name, {.in_evaluation = call}, own(), counter), std::runtime_error);
    trainer_.reset();
    EXPECT_EQ(run_own(name, {}, own(), counter).outcome, RunOutcome::Done);
    trainer_.reset();
    EXPECT_EQ(logged(name, "step"), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8})) << call;
    EXPECT_EQ(logged(name, "evaluation"), (std::vector<int64_t>{0, 4, 8})) << call;
  }
}

TEST_F(OwnTask, ASkippedStepIsTakenAgainToNameTheCulpritAndLeavesNoTrace) {
  for (const std::string precision : {"bf16", "fp16"})
    for (const int64_t accumulation : {1, 3}) {
      json culprit;
      for (const std::string traced : {"false", "true"}) {
        Counter counter;
        const std::string name = detail::concat(precision, "-", accumulation, "-", traced);
        const ResolvedConfig config = own({"precision.compute=" + precision, "watch.trace_on_skip=" + traced,
                                           detail::concat("train.accumulation=", accumulation)});
        EXPECT_EQ(run_own(name, {.infinite_batch = 5}, config, counter).outcome, RunOutcome::Done);
        trainer_.reset();
        for (const json& record : log(name))
          if (record["kind"] == "culprit") culprit = record;
      }
      ASSERT_FALSE(culprit.is_null()) << precision << accumulation;
      EXPECT_EQ(culprit["step"], accumulation == 1 ? 5 : 2);
      EXPECT_EQ(culprit["op"], "input");
      EXPECT_EQ(culprit["precision_is_cause"], false);
      const std::string name = detail::concat(precision, "-", accumulation, "-");
      EXPECT_EQ(last_state(name + "true"), last_state(name + "false")) << name;
      EXPECT_EQ(logged(name + "true", "culprit").size(), 1u);
      const auto lines = log(name + "true");
      const auto finding = std::ranges::find(lines, "finding", [](const json& line) { return line["kind"]; });
      ASSERT_NE(finding, lines.end());
      EXPECT_EQ((*finding)["code"], "nan-producer");
      EXPECT_TRUE(logged(name + "false", "culprit").empty());
    }
}

TEST_F(OwnTask, AStateThatNoCheckpointHoldsEndsTheRunByName) {
  Counter counter;
  const std::string message =
      error_of([&] { (void)run_own("run", {.unsavable = true}, own({"checkpoint.every=2"}), counter); });
  EXPECT_NE(message.find("spectrum"), std::string::npos) << message;
  EXPECT_EQ(message.find("Free some space"), std::string::npos) << message;
}

TEST_F(OwnTask, GoingBackLeavesBatchesOutAndBringsBackWhatTheTaskRemembers) {
  Counter counter;
  const RunEnd end = run_own("run", {.spike_from = 150},
                             own({"train.steps=260", "train.evaluate_every=0", "checkpoint.every=20",
                                  "train.on_divergence=rollback"}),
                             counter);
  EXPECT_EQ(end.outcome, RunOutcome::Done) << end.why;
  const bool went_back = std::any_of(counter.notes.begin(), counter.notes.end(), [](const std::string& note) {
    return note.find("rolled back") != std::string::npos;
  });
  ASSERT_TRUE(went_back);
  EXPECT_GT(task_->taken(), 260) << "batches were left out";
  EXPECT_EQ(task_->remembered(), 260) << "what the model remembers is that of its steps";
  std::vector<float> numbers = task_->first_numbers;
  std::sort(numbers.begin(), numbers.end());
  EXPECT_EQ(std::adjacent_find(numbers.begin(), numbers.end()), numbers.end())
      << "no batch comes again from the same random numbers";
}

}  // namespace
}  // namespace halfstep::testing
