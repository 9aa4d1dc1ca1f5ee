// Runs of the trainer on the test accelerator: their bits, their waits, and checkpoints that go from one
// device to another.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <halfstep/task.h>
#include <torch/torch.h>

#include <numeric>

#include "support/any_machine.h"
#include "support/counting_device.h"
#include "support/error_of.h"
#include "tensor/update_path.h"
#include "train/trainer_fixture.h"

namespace halfstep::testing {
namespace {

class DeviceTrainer : public TrainerTest {
 protected:
  ResolvedConfig on(const std::string& device, std::vector<std::string> set = {}) const {
    set.push_back("run.device=" + device);
    // With it LibTorch computes attention by other operations, and other ones on each device.
    set.emplace_back("model.dropout=0");
    return config(set);
  }

  std::vector<double> losses(const std::string& name) const {
    std::vector<double> found;
    for (const json& record : log(name))
      if (record.at("kind") == "step" || record.at("kind") == "evaluation")
        found.push_back(record.at("loss"));
    return found;
  }

  AtenOnCpu twin_;
};

TEST_F(DeviceTrainer, RunHasTheBitsOfTheSameOperationsOnTheCpu) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  for (const std::string precision : {"fp32", "bf16", "fp16"}) {
    const std::vector<std::string> set = {"precision.compute=" + precision};
    Counter here, there;
    run(on("cpu", set), precision + "-here", here);
    run(on(device_under_test().str(), set), precision + "-there", there);
    EXPECT_EQ(there.steps, 8);
    EXPECT_EQ(there.evaluations, 3);
    EXPECT_EQ(there.samples, here.samples);
    EXPECT_EQ(losses(precision + "-there"), losses(precision + "-here")) << precision;
    EXPECT_EQ(last_state(precision + "-there"), last_state(precision + "-here")) << precision;
    EXPECT_EQ(load_pretrained(folder_ / (precision + "-there") / "model")->vocabulary(), 256);
  }
}

TEST_F(DeviceTrainer, CheckpointsGoFromOneDeviceToTheOther) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  for (const std::string precision : {"bf16", "fp16"}) {
    const std::vector<std::string> set = {"precision.compute=" + precision};
    Counter whole, first(2), second(5), third;
    run(on("cpu", set), precision + "-whole", whole);
    run(on(device_under_test().str(), set), precision + "-parts", first);
    EXPECT_EQ(run(on("cpu", set), precision + "-parts", second).step, 5);
    EXPECT_EQ(run(on(device_under_test().str(), set), precision + "-parts", third).outcome, RunOutcome::Done);
    EXPECT_EQ(last_state(precision + "-parts"), last_state(precision + "-whole")) << precision;
    EXPECT_EQ(losses(precision + "-parts"), losses(precision + "-whole")) << precision;
  }
}

/// One for each logged step, one for each evaluation, none for the others.
TEST_F(DeviceTrainer, WaitsForLoggedStepsAndEvaluationsOnly) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  const auto waits_of = [&](int64_t log_every, int64_t evaluate_every) {
    const std::string name = "log" + std::to_string(log_every) + "-" + std::to_string(evaluate_every);
    Counter counter;
    const ResolvedConfig resolved =
        on(device_under_test().str(), {"precision.compute=fp16", "train.steps=24", "train.sample_every=0",
                                       "checkpoint.every=0", "log.every=" + std::to_string(log_every),
                                       "train.evaluate_every=" + std::to_string(evaluate_every)});
    Trainer trainer(resolved, folder_ / name);
    reset_device_counts();
    trainer.run(counter, counter.stop);
    EXPECT_EQ(counter.steps, 24);
    return device_counts().waits;
  };
  const int64_t seldom = waits_of(/*log_every=*/12, /*evaluate_every=*/0);
  EXPECT_EQ(waits_of(/*log_every=*/1, 0), seldom + 22);
  EXPECT_LE(waits_of(/*log_every=*/12, /*evaluate_every=*/12), seldom + 3);
  std::printf("waits of a run of 24 steps, 2 of them logged, with its last checkpoint: %ld\n", long(seldom));
}

/// Losses that are Inf from a step on, on a device that is asked every tenth step.
class Overflowing final : public Task {
 public:
  explicit Overflowing(int64_t from, int64_t to, int64_t throws_at = -1)
      : from_(from), to_(to), throws_at_(throws_at) {
    model_ = std::make_shared<torch::nn::LinearImpl>(4, 2);
  }
  torch::nn::Module& model() override { return *model_; }
  void take_batch() override {
    if (++batch_ == throws_at_) throw std::runtime_error("no more batches");
  }
  at::Tensor loss() override {
    const at::Tensor x = torch::ones({2, 4}).to(model_->weight.device());
    return model_->forward(x).square().sum() * (batch_ >= from_ && batch_ < to_ ? factor : 1.0);
  }
  Score evaluate(const MixedPrecision&) override { return {}; }
  StateDict state_dict() const override {
    StateDict saved;
    saved.set("batch", batch_);
    return saved;
  }
  void load_state_dict(const StateDict& saved) override { batch_ = saved.integer("batch"); }

  double factor = INFINITY;

 private:
  std::shared_ptr<torch::nn::LinearImpl> model_;
  int64_t from_, to_, throws_at_, batch_ = 0;
};

class Recorder : public Counter {
 public:
  void step(const StepRecord& record) override {
    Counter::step(record);
    told.push_back(record.step);
  }
  std::vector<int64_t> told;
};

class DeviceRuns : public DeviceTrainer {
 protected:
  RunEnd run_own(std::unique_ptr<Task> task, std::vector<std::string> set, const std::string& name,
                 Counter& counter) const {
    std::vector<std::string> all = {"model.kind=own", "run.device=" + device_under_test().str(),
                                    "train.steps=30", "log.every=10", "train.evaluate_every=0"};
    all.insert(all.end(), set.begin(), set.end());
    Trainer trainer(std::move(task), resolve_config({.set = all}), folder_ / name);
    return trainer.run(counter, counter.stop);
  }
};

TEST_F(DeviceRuns, SkippedStepsBetweenLoggedOnesAreInTheLog) {
  Recorder recorder;
  const RunEnd end = run_own(std::make_unique<Overflowing>(13, 15),
                             {"checkpoint.every=3", "log.trace_steps=2"}, "run", recorder);
  EXPECT_EQ(end.outcome, RunOutcome::Done) << end.why;
  std::vector<int64_t> all(30), logged;
  std::iota(all.begin(), all.end(), 1);
  EXPECT_EQ(recorder.told, all);
  for (const json& record : log("run"))
    if (record.at("kind") == "step") logged.push_back(record.at("step"));
  EXPECT_EQ(logged, (std::vector<int64_t>{10, 13, 14, 20, 30}));
}

TEST_F(DeviceRuns, LimitOfSkipsEndsTheRun) {
  Recorder recorder;
  const RunEnd end =
      run_own(std::make_unique<Overflowing>(3, 1000),
              {"precision.compute=fp16", "precision.loss_scale.max_consecutive_skips=3"}, "run", recorder);
  EXPECT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  EXPECT_LE(end.step, 7);
}

/// A loss that has risen and fallen again between two logged steps.
TEST_F(DeviceRuns, DivergenceBetweenLoggedStepsIsSeen) {
  for (const std::string what : {"stop", "rollback", "go_on"}) {
    Recorder recorder;
    auto task = std::make_unique<Overflowing>(202, 250);
    task->factor = 1e4;
    const RunEnd end = run_own(std::move(task),
                               {"train.steps=300", "log.every=100", "checkpoint.every=50",
                                "optimizer.lr=1e-5", "train.on_divergence=" + what},
                               what, recorder);
    EXPECT_EQ(end.outcome, what == "stop" ? RunOutcome::Diverged : RunOutcome::Done)
        << what << ": " << end.why;
    // Told in order; a rollback goes over some steps again.
    EXPECT_EQ(std::is_sorted(recorder.told.begin(), recorder.told.end()), what != "rollback") << what;
    EXPECT_EQ(recorder.told.back(), what == "stop" ? 250 : 300) << what;
  }
}

TEST_F(DeviceRuns, StopsAtOnceAndTellsAll) {
  class Stopper : public Recorder {
   public:
    void begin(const RunPlan&) override { stop = true; }
  } recorder;
  const RunEnd end = run_own(std::make_unique<Overflowing>(1000, 1000), {}, "run", recorder);
  EXPECT_EQ(end.outcome, RunOutcome::Interrupted);
  EXPECT_EQ(static_cast<int64_t>(recorder.told.size()), end.step);
}

TEST_F(DeviceRuns, TaskThatThrowsLosesNoStep) {
  Recorder recorder;
  EXPECT_THROW(run_own(std::make_unique<Overflowing>(4, 5, /*throws_at=*/8), {}, "run", recorder),
               std::exception);
  EXPECT_EQ(recorder.told, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
}

TEST_F(DeviceTrainer, DeviceThatIsNotThereIsRefusedByName) {
  Counter counter;
  for (const char* name : {"gpu", "cuda:99", "xpu:99"})
    EXPECT_NE(error_of([&] { run(on(name), "run", counter); }).find(std::string("run.device is '") + name),
              std::string::npos)
        << name;
}

}  // namespace
}  // namespace halfstep::testing
