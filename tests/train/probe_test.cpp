// A Probe sees the tensors of the steps that it looks at, and changes none of them.
#include <gtest/gtest.h>
#include <halfstep/probe.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <limits>
#include <map>
#include <stdexcept>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/small_models.h"

namespace halfstep {
namespace probe_test {

using testing::bit_equal;
using testing::kAnyMachine;
using testing::Mlp;

std::shared_ptr<Mlp> fresh_model() {
  torch::manual_seed(1);
  return std::make_shared<Mlp>(20, 24, 10);
}

at::Tensor batch_loss(Mlp& model, int number) {
  torch::manual_seed(100 + number);
  return model.loss(torch::randn({32, 20}), torch::randint(10, {32}));
}

std::vector<Precision> precisions() { return {Precision::fp32(), Precision::bf16(), Precision::fp16()}; }

TEST(Probe, LooksAtTheFirstStepAndEachThatItsNumberDivides) {
  auto model = fresh_model();
  TrainStep step(Precision::bf16(), *model, AdamWOptions{.lr = 1e-2},
                 {.precision = {.autocast = kAnyMachine}});
  Probe probe(step.mixed_precision(), {.every = 3});
  std::map<int64_t, std::map<std::string, int>> seen;
  for (int number = 1; number <= 8; ++number) {
    (void)step([&] { return batch_loss(*model, number); });
    for (const ProbeRecord& record : probe.take()) ++seen[record.step][record.role];
  }
  ASSERT_EQ(seen.size(), 3u);
  for (const int64_t at : {1, 3, 6}) {
    EXPECT_EQ(seen[at]["weight"], 6);
    EXPECT_EQ(seen[at]["gradient"], 6);
    EXPECT_EQ(seen[at]["update"], 6);
    EXPECT_EQ(seen[at]["activation"], 3);
  }
}

TEST(Probe, ItsNumbersAreThoseOfTheTensors) {
  for (const Precision& precision : precisions()) {
    auto model = fresh_model();
    MixedPrecision mp(precision, *model, {.autocast = kAnyMachine});
    AdamW optimizer(mp.params(), {.lr = 1e-2});
    Probe probe(mp, {.every = 1});
    at::Tensor first_output;
    torch::manual_seed(5);
    const at::Tensor x = torch::randn({32, 20}), target = torch::randint(10, {32});
    const at::Tensor loss = mp.forward([&] {
      first_output = model->body[0]->as<torch::nn::Linear>()->forward(x);
      return model->loss(x, target);
    });
    mp.backward(loss);
    const GradSummary grads = mp.inspect_grads();
    std::map<std::string, at::Tensor> gradients, before, after;
    for (const Param& param : mp.params()) {
      gradients[param.name] = param.working.grad().clone();
      before[param.name] = full_precision(param);
    }
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    for (const Param& param : mp.params()) after[param.name] = full_precision(param);
    const auto expect = [](const ProbeRecord& record, const at::Tensor& tensor, int64_t times = 1) {
      const at::Tensor values = tensor.detach().to(at::kDouble);
      EXPECT_EQ(record.stats.count, times * values.numel()) << record.role << " " << record.name;
      EXPECT_EQ(record.stats.zeros, times * (values == 0).sum().item<int64_t>());
      EXPECT_EQ(static_cast<double>(record.stats.amax), values.abs().max().item<double>());
      EXPECT_NEAR(record.stats.sum, static_cast<double>(times) * values.sum().item<double>(),
                  1e-9 * static_cast<double>(values.numel()));
    };
    int looked = 0;
    for (const ProbeRecord& record : probe.take()) {
      if (record.role == "gradient") expect(record, gradients.at(record.name)), ++looked;
      if (record.role == "weight") expect(record, after.at(record.name)), ++looked;
      if (record.role == "update") expect(record, after.at(record.name) - before.at(record.name)), ++looked;
      if (record.role == "activation" && record.name == "body.0") expect(record, first_output, 2), ++looked;
    }
    EXPECT_EQ(looked, 19);
  }
}

TEST(Probe, ChangesNoBit) {
  for (const Precision& precision : precisions()) {
    std::vector<at::Tensor> ends[2];
    for (const bool watched : {false, true}) {
      auto model = fresh_model();
      TrainStep step(precision, *model, AdamWOptions{.lr = 1e-2},
                     {.micro_batches = 2, .precision = {.autocast = kAnyMachine}});
      std::optional<Probe> probe;
      if (watched) probe.emplace(step.mixed_precision(), ProbeOptions{.every = 2});
      for (int number = 1; number <= 6; ++number) (void)step([&] { return batch_loss(*model, number); });
      for (const Param& param : step.mixed_precision().params())
        ends[watched].push_back(full_precision(param));
    }
    for (std::size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(bit_equal(ends[0][i], ends[1][i]));
  }
}

// A mask may be the lowest number of its type. It is no magnitude that logits have, near overflow or not.
TEST(Probe, AMaskOfFiniteNumbersIsNoLogit) {
  torch::nn::Linear model(4, 4);
  for (const double mask :
       {-65504.0, -3.4028234663852886e38, -1e9, -std::numeric_limits<double>::infinity()}) {
    MixedPrecision mp(Precision::fp32(), model);
    SGD optimizer(mp.params(), {.lr = 1e-3});
    Probe probe(mp, {.every = 1});
    const at::Tensor hidden = torch::ones({4, 4}, at::kBool).triu(1);
    mp.backward(mp.forward([&] {
      return at::softmax(model(torch::ones({4, 4})) + torch::zeros({4, 4}).masked_fill(hidden, mask), -1)
          .square()
          .sum();
    }));
    const GradSummary grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    int looks = 0;
    for (const ProbeRecord& record : probe.take())
      if (record.name.ends_with(ProbeRecord::kLogitsAfter)) {
        ++looks;
        EXPECT_EQ(record.stats.infinities, 6) << mask;
        EXPECT_LT(record.stats.amax, 100.0f) << mask;
      }
    EXPECT_EQ(looks, 1);
  }
}

TEST(Probe, LooksMoreRarelyInALongRun) {
  torch::nn::Linear model(2, 2);
  MixedPrecision mp(Precision::fp32(), model);
  SGD optimizer(mp.params(), {.lr = 1e-3});
  Probe probe(mp, {.every = 1});
  std::vector<int64_t> steps;
  for (int64_t number : {1, 2, 40, 41, 42, 80, 81, 82, 84, 160, 164, 168}) {
    probe.set_step(number);
    mp.backward(mp.forward([&] { return model(torch::ones({1, 2})).sum(); }));
    const GradSummary grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
    if (const auto records = probe.take(); !records.empty()) steps.push_back(records.front().step);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 40, 42, 80, 84, 160, 168}));
}

/// How many values each activation had.
std::map<std::string, int64_t> activation_counts(const std::vector<ProbeRecord>& records) {
  std::map<std::string, int64_t> counts;
  for (const ProbeRecord& record : records)
    if (record.role == "activation") counts[record.name] += record.stats.count;
  return counts;
}

TEST(Probe, OfAForwardThatThrewOrWasAnEvaluationNothingIsLeft) {
  auto model = fresh_model();
  TrainStep step(Precision::fp32(), *model, AdamWOptions{.lr = 1e-2});
  Probe probe(step.mixed_precision(), {.every = 1});
  (void)step([&] { return batch_loss(*model, 1); });
  const auto first = activation_counts(probe.take());
  ASSERT_EQ(first.size(), 4u);  // layers, and the logits of the loss
  EXPECT_THROW((void)step([&] {
                 (void)batch_loss(*model, 2);
                 throw std::runtime_error("no batch");
                 return at::Tensor();
               }),
               std::runtime_error);
  try {
    step.forward([&] {
      (void)batch_loss(*model, 2);
      throw std::runtime_error("no batch");
    });
  } catch (const std::runtime_error&) {  // nobody has called zero_grad
  }
  step.forward([&] {
    const torch::NoGradGuard evaluation;
    return batch_loss(*model, 3);
  });
  (void)step([&] { return batch_loss(*model, 4); });
  EXPECT_EQ(activation_counts(probe.take()), first);
}

TEST(Probe, AStepThatStartsAgainIsToldOnce) {
  auto model = fresh_model();
  MixedPrecision mp(Precision::fp32(), *model);
  Probe probe(mp, {.every = 1});
  for (const bool starts_again : {true, false}) {
    mp.backward(mp.forward([&] { return batch_loss(*model, 1); }));
    const GradSummary grads = mp.inspect_grads();
    starts_again ? mp.zero_grad() : mp.advance(grads);
  }
  std::map<std::string, int> roles;
  for (const ProbeRecord& record : probe.take()) ++roles[record.role];
  EXPECT_EQ(roles,
            (std::map<std::string, int>{{"activation", 4}, {"gradient", 6}, {"weight", 6}, {"update", 6}}));
}

TEST(Probe, LogitsAreCountedOnceInAForwardInsideAnotherToo) {
  auto model = fresh_model();
  MixedPrecision mp(Precision::fp32(), *model);
  Probe probe(mp, {.every = 1});
  const auto loss = [&] { return at::softmax(model->body->forward(torch::ones({2, 20})), -1).sum(); };
  mp.backward(mp.forward([&] { return loss() + mp.forward(loss); }));
  mp.advance(mp.inspect_grads());
  EXPECT_EQ(activation_counts(probe.take()),
            (std::map<std::string, int64_t>{
                {"body.0", 96}, {"body.2", 96}, {"body.4", 40}, {"body.4, logits after it", 40}}));
}

TEST(Probe, MayEndAtAnyTimeAndAnotherTakeItsPlace) {
  auto model = fresh_model();
  auto first = std::make_unique<MixedPrecision>(Precision::fp32(), *model);
  auto probe = std::make_unique<Probe>(*first, ProbeOptions{.every = 1});
  probe =
      std::make_unique<Probe>(*first, ProbeOptions{.every = 1});  // the new one is there before the old goes
  MixedPrecision mp = std::move(*first);
  first.reset();
  const auto run = [&](bool ends_within) {
    mp.backward(mp.forward([&] {
      if (ends_within) probe.reset();
      return batch_loss(*model, 1);
    }));
    mp.advance(mp.inspect_grads());
    mp.zero_grad();
  };
  run(false);
  EXPECT_EQ(probe->take().size(), 22u);
  run(true);
  std::optional<MixedPrecision> second(std::move(mp));
  Probe last(*second, {.every = 1});
  second.reset();  // before the Probe
}

TEST(Statistics, OfTensorsThatAreNotInOneRow) {
  const at::Tensor square = torch::randn({64, 64});
  EXPECT_EQ(statistics_of(square.t()).packed(), statistics_of(square.t().contiguous()).packed());
  EXPECT_EQ(statistics_of(square.to(at::kDouble)).count, 4096);
  EXPECT_THROW((void)statistics_of(torch::ones({2}, at::kLong)), Error);
}

}  // namespace probe_test
}  // namespace halfstep
