// The whole state of a run through a checkpoint on disk: the rest of it has the bits of the uninterrupted
// one.
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/error_of.h"
#include "support/scratch.h"
#include "support/small_models.h"
#include "support/states.h"

namespace halfstep {
namespace {

using testing::ScratchFolder;

/// Dropout, and a batch norm whose running statistics are buffers: what parameters alone would not restore.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(12, 300));  // 8-bit moments: more than one block
    norm = register_module("norm", torch::nn::BatchNorm1d(300));
    last = register_module("last", torch::nn::Linear(300, 5));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target) {
    const at::Tensor hidden = at::dropout(at::relu(norm(first(x))), 0.3, is_training());
    return torch::nn::functional::cross_entropy(last(hidden), target);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

Schedule schedule() { return Schedule::cosine({.warmup_steps = 3, .total_steps = 20}); }

template <typename Optimizer>
Optimizer make_optimizer(const MixedPrecision& mp, MomentStorage moments);
template <>
AdamW make_optimizer(const MixedPrecision& mp, MomentStorage moments) {
  return AdamW(mp.params(), {.lr = 1e-2, .moments = moments, .schedule = schedule()}, /*seed=*/3);
}
template <>
SGD make_optimizer(const MixedPrecision& mp, MomentStorage moments) {
  return SGD(mp.params(), {.lr = 1e-2, .momentum = 0.9, .moments = moments, .schedule = schedule()},
             /*seed=*/3);
}

template <typename Optimizer>
struct Training {
  Training(const Precision& precision, MomentStorage moments, int seed)
      : model((torch::manual_seed(seed), std::make_shared<Net>())),
        mp(precision, *model, {.autocast = testing::kAnyMachine}),
        optimizer(make_optimizer<Optimizer>(mp, moments)) {}

  void train(int64_t until) {
    for (; next_step < until; ++next_step) {
      // Drawn from the default generator, as dropout is: nothing here is seeded again.
      const auto x = torch::randn({16, 12}), target = torch::randint(5, {16});
      mp.backward(mp.forward([&] { return model->loss(x, target); }));
      const auto grads = mp.inspect_grads();
      (void)optimizer.step(grads.clipped_to(0.5));
      mp.advance(grads);
      optimizer.zero_grad();
    }
  }

  Checkpoint checkpoint() const {
    StateDict data;
    data.set("next_step", next_step);
    return {.step = next_step,
            .parts = {{"precision", mp.state_dict()},
                      {"optimizer", optimizer.state_dict()},
                      {"random", random_state()},
                      {"data", data}}};
  }

  void load(const Checkpoint& saved) {
    mp.load_state_dict(saved.part("precision"));
    optimizer.load_state_dict(saved.part("optimizer"));
    load_random_state(saved.part("random"));
    next_step = saved.part("data").integer("next_step");
  }

  std::shared_ptr<Net> model;
  MixedPrecision mp;
  Optimizer optimizer;
  int64_t next_step = 0;
};

void expect_same(const Checkpoint& expected, const Checkpoint& found) {
  EXPECT_EQ(expected.step, found.step);
  ASSERT_EQ(expected.parts.size(), found.parts.size());
  for (const auto& [name, state] : expected.parts) {
    SCOPED_TRACE(name);
    testing::expect_same_state(state, found.part(name));
  }
}

template <typename Optimizer>
void expect_resumed_run_is_the_same(const Precision& precision, MomentStorage moments) {
  SCOPED_TRACE(detail::concat(precision.name(), ", moments ", to_string(moments)));
  const ScratchFolder scratch;
  Training<Optimizer> whole(precision, moments, 1);
  whole.train(5);
  const Checkpoint at_five = whole.checkpoint();
  CheckpointFolder(scratch.path() / "run").save(at_five);
  whole.train(12);
  const Checkpoint expected = whole.checkpoint();

  Training<Optimizer> resumed(precision, moments, 2);
  resumed.train(2);  // somewhere else entirely, and the generators too
  resumed.load(*CheckpointFolder(scratch.path() / "run").load_latest());
  expect_same(at_five, resumed.checkpoint());
  resumed.train(12);
  expect_same(expected, resumed.checkpoint());
}

std::vector<Precision> precisions() {
  auto fp16 = Precision::fp16();
  fp16.loss_scaling->growth_interval = 2;  // so that the scale moves within the test
  return {Precision::fp32(), Precision::bf16(), Precision::bf16(WeightStorage::Kahan),
          Precision::bf16(WeightStorage::Stochastic), fp16};
}

TEST(Resume, WithAdamWHasTheBitsOfTheUninterruptedRun) {
  for (const Precision& precision : precisions())
    for (const auto moments : {MomentStorage::Fp32, MomentStorage::Bf16, MomentStorage::Blockwise8})
      expect_resumed_run_is_the_same<AdamW>(precision, moments);
}

TEST(Resume, WithSgdHasTheBitsOfTheUninterruptedRun) {
  for (const Precision& precision : precisions())
    for (const auto moments : {MomentStorage::Fp32, MomentStorage::Bf16, MomentStorage::Blockwise8})
      expect_resumed_run_is_the_same<SGD>(precision, moments);
}

// Stopped between two micro-batches: the sum so far goes on where it was.
TEST(Resume, BetweenMicroBatchesHasTheBitsOfTheUninterruptedRun) {
  for (const auto kind : {Accumulation::Fp32, Accumulation::Bf16Kahan}) {
    const auto run = [&](int seed, auto&& body) {
      torch::manual_seed(seed);
      const auto model = std::make_shared<Net>();
      MixedPrecision mp(Precision::bf16(), *model, {.autocast = testing::kAnyMachine, .accumulation = kind});
      AdamW optimizer(mp.params(), {.lr = 1e-2});
      const auto micro_batch = [&] {
        const auto x = torch::randn({16, 12}), target = torch::randint(5, {16});
        mp.backward(mp.forward([&] { return model->loss(x, target) / 3; }));
      };
      const auto finish = [&] {
        micro_batch();
        mp.close_sum();
        const auto grads = mp.inspect_grads();
        (void)optimizer.step(grads.clipped_to(0.5));
        mp.advance(grads);
        optimizer.zero_grad();
        return Checkpoint{.step = 2,
                          .parts = {{"precision", mp.state_dict()}, {"optimizer", optimizer.state_dict()}}};
      };
      return body(*model, mp, micro_batch, finish);
    };
    const ScratchFolder scratch;
    CheckpointFolder folder(scratch.path() / "run");
    const Checkpoint expected = run(1, [&](Net& model, MixedPrecision& mp, auto& micro_batch, auto& finish) {
      micro_batch();
      micro_batch();
      folder.save(
          {.step = 1,
           .parts = {
               {"model", module_state(model)}, {"precision", mp.state_dict()}, {"random", random_state()}}});
      return finish();
    });
    const Checkpoint saved = folder.load(1);
    const Checkpoint resumed = run(2, [&](Net& model, MixedPrecision& mp, auto& micro_batch, auto& finish) {
      micro_batch();  // a sum that loading must replace
      load_module_state(model, saved.part("model"));
      mp.load_state_dict(saved.part("precision"));
      load_random_state(saved.part("random"));
      return finish();
    });
    expect_same(expected, resumed);
    EXPECT_EQ(saved.part("precision").integer("accumulation.micro_batches"), 2);
  }
}

TEST(Resume, ASumOfMicroBatchesThatDoesNotFitIsRefused) {
  Net model;
  MixedPrecision mp(Precision::bf16(), model,
                    {.autocast = testing::kAnyMachine, .accumulation = Accumulation::Fp32});
  const StateDict fits = mp.state_dict();
  const auto with = [&](const std::string& name, StateDict::Value value) {
    StateDict state = fits;
    state.set("accumulation.micro_batches", int64_t{1});
    state.set("accumulation.bad_micro_batch", int64_t{-1});
    state.set("accumulation.bad_parameter", std::string());
    state.set("accumulation." + name, std::move(value));
    return testing::error_of([&] { mp.load_state_dict(state); });
  };
  EXPECT_EQ(with("sum.last.bias", torch::zeros({5})), "no error");
  EXPECT_NE(
      with("sum.last.bias", torch::zeros({6})).find("is Float of shape [6], expected Float of shape [5]"),
      std::string::npos);
  EXPECT_NE(with("sum.nobody", torch::zeros({5})).find("Unknown: 'sum.nobody'"), std::string::npos);
  EXPECT_NE(with("micro_batches", int64_t{-1}).find("expected a count"), std::string::npos);
}

// The tests above can fail: without any one of the parts the run goes another way.
TEST(Resume, WithoutAnyOnePartIsAnotherRun) {
  const ScratchFolder scratch;
  Training<AdamW> whole(Precision::bf16(), MomentStorage::Fp32, 1);
  whole.train(5);
  const Checkpoint saved = whole.checkpoint();
  whole.train(8);
  const at::Tensor expected = whole.model->first->weight.detach().clone();
  const at::Tensor statistics = whole.model->norm->running_var.detach().clone();
  for (const char* left_out : {"precision", "optimizer", "random"}) {
    Training<AdamW> resumed(Precision::bf16(), MomentStorage::Fp32, 2);
    Checkpoint partial = saved;
    partial.parts[left_out] = resumed.checkpoint().part(left_out);
    resumed.load(partial);
    resumed.train(8);
    EXPECT_FALSE(testing::bit_equal(expected, resumed.model->first->weight) &&
                 testing::bit_equal(statistics, resumed.model->norm->running_var))
        << left_out;
  }
}

}  // namespace
}  // namespace halfstep
