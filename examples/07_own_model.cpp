// Your own model, loss and batches in halfstep::Trainer: log, checkpoints, report, and a resumed run with the
// bits of one that was never stopped. 07_own_model FOLDER [KEY=VALUE]...
#include <ATen/CPUGeneratorImpl.h>
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdio>

#include "support/fashion_mnist.h"

struct Net : torch::nn::Module {
  Net() {
    convolution =
        register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 5).stride(2)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    output = register_module("output", torch::nn::Linear(8 * 12 * 12, 10));
  }
  torch::Tensor forward(const torch::Tensor& pixels) {
    const auto features = torch::relu(norm(convolution(pixels.view({-1, 1, 28, 28}))));
    return output(torch::dropout(features.flatten(1), 0.1, is_training()));
  }
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear output{nullptr};
};

class Clothes : public halfstep::Task {
 public:
  Clothes() : train_(load_fashion_mnist("train")), test_(load_fashion_mnist("t10k")) {}

  torch::nn::Module& model() override { return *net_; }

  // Which images come next is decided by one number: that is all there is to save.
  void take_batch() override {
    at::Generator random = at::detail::createCPUGenerator(static_cast<uint64_t>(batches_taken_++));
    batch_ = torch::randint(train_.labels.size(0), {64}, random, torch::kLong);
  }

  torch::Tensor loss() override {
    const auto logits = net_->forward(train_.pixels.index_select(0, batch_));
    return torch::cross_entropy_loss(logits, train_.labels.index_select(0, batch_));
  }

  halfstep::Score evaluate(const halfstep::MixedPrecision& precision) override {
    const halfstep::EvaluationScope evaluation(*net_);
    const auto logits = precision.forward([&] { return net_->forward(test_.pixels); }).to(torch::kFloat);
    return {.loss = torch::cross_entropy_loss(logits, test_.labels).item<double>(),
            .accuracy = logits.argmax(1).eq(test_.labels).to(torch::kFloat).mean().item<double>(),
            .count = test_.labels.size(0)};
  }

  halfstep::StateDict state_dict() const override {
    halfstep::StateDict state;
    state.set("batches_taken", batches_taken_);
    return state;
  }
  void load_state_dict(const halfstep::StateDict& saved) override {
    batches_taken_ = saved.integer("batches_taken");
  }

  std::string model_text() const override { return "a convolution and a linear layer"; }
  std::string data_text() const override { return "Fashion-MNIST"; }
  std::string unit() const override { return "images"; }
  int64_t items_per_batch() const override { return 64; }

 private:
  Images train_, test_;
  std::shared_ptr<Net> net_ = std::make_shared<Net>();
  int64_t batches_taken_ = 0;
  torch::Tensor batch_;
};

struct Screen : halfstep::RunWatcher {
  void begin(const halfstep::RunPlan& plan) override {
    std::printf("%s, %ld parameters, %s\n", plan.model.c_str(), long(plan.parameters),
                plan.precision.c_str());
  }
  void step(const halfstep::StepRecord&) override {}
  void evaluation(const halfstep::EvaluationRecord& record) override {
    std::printf("step %ld: test accuracy %.4f\n", long(record.step), record.accuracy.value_or(0));
  }
  void sample(const halfstep::SampleRecord&) override {}
  void note(int64_t step, std::string_view text) override {
    std::printf("step %ld: %s\n", long(step), std::string(text).c_str());
  }
  void end(const halfstep::RunEnd& end) override { std::printf("%s\n", end.why.c_str()); }
};

std::atomic<bool> stop = false;

int main(int argc, char** argv) try {
  if (argc < 2) throw halfstep::Error("07_own_model FOLDER [KEY=VALUE]...");
  std::signal(SIGINT, [](int) { stop = true; });  // the step under way is finished, and saved
  std::signal(SIGTERM, [](int) { stop = true; });
  std::vector<std::string> set = {"model.kind=own",  "precision.compute=bf16",   "optimizer.lr=2e-3",
                                  "train.steps=400", "train.evaluate_every=200", "train.threads=2"};
  set.insert(set.end(), argv + 2, argv + argc);
  torch::manual_seed(1);  // the weights that the model begins with
  halfstep::Trainer trainer(std::make_unique<Clothes>(), halfstep::resolve_config({.set = set}), argv[1]);
  Screen screen;
  const halfstep::RunEnd end = trainer.run(screen, stop);
  return end.outcome == halfstep::RunOutcome::Done || end.outcome == halfstep::RunOutcome::Interrupted ? 0
                                                                                                       : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
