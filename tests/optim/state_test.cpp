// A run that is stopped, saved and resumed follows the uninterrupted one, bit for bit.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"
#include "support/states.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::error_of;
using testing::expect_same_state;

std::vector<Param> two_params(WeightStorage storage) {
  torch::manual_seed(21);
  std::vector<Param> params;
  for (const int64_t count : {700, 33})
    params.push_back(make_param(detail::concat("p", count), torch::randn({count}), storage, at::kBFloat16));
  return params;
}

void set_grads(const std::vector<Param>& params, int step) {
  torch::manual_seed(1000 + step);
  for (const Param& param : params)
    param.working.mutable_grad() = torch::randn(param.working.sizes()).to(at::kBFloat16);
}

template <typename Optimizer, typename Options>
void expect_resumable(WeightStorage storage, const Options& options) {
  const auto whole = two_params(storage), resumed = two_params(storage);
  Optimizer uninterrupted(whole, options, /*seed=*/7), first_half(resumed, options, /*seed=*/7);
  const auto run = [](Optimizer& optimizer, const std::vector<Param>& params, int from, int to) {
    for (int step = from; step < to; ++step) {
      set_grads(params, step);
      ASSERT_TRUE(optimizer.step(GradMultiplier().times(0.5)).stepped());
    }
  };
  run(uninterrupted, whole, 0, 8);
  run(first_half, resumed, 0, 4);
  const StateDict saved = first_half.state_dict();
  // Other options and another seed: all of them come back with the state.
  Options other = options;
  other.lr = 123;
  other.schedule = {};
  Optimizer second_half(resumed, other, /*seed=*/99);
  second_half.load_state_dict(saved);
  run(second_half, resumed, 4, 8);
  for (size_t i = 0; i < whole.size(); ++i)
    EXPECT_TRUE(bit_equal(full_precision(whole[i]), full_precision(resumed[i])));
  expect_same_state(uninterrupted.state_dict(), second_half.state_dict());
}

TEST(OptimizerState, ResumedRunFollowsTheUninterruptedOneInEveryStorage) {
  const auto schedule = Schedule::cosine({.warmup_steps = 2, .total_steps = 9});
  for (const auto moments : {MomentStorage::Fp32, MomentStorage::Bf16, MomentStorage::Blockwise8})
    for (const auto storage : {WeightStorage::Fp32, WeightStorage::Fp32Master, WeightStorage::SplitMaster,
                               WeightStorage::Kahan, WeightStorage::Stochastic, WeightStorage::Nearest})
      expect_resumable<AdamW>(storage, AdamWOptions{.lr = 1e-2, .moments = moments, .schedule = schedule});
  expect_resumable<SGD>(WeightStorage::SplitMaster,
                        SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .schedule = schedule});
}

TEST(OptimizerState, IsACopyThatLaterStepsDoNotChange) {
  const auto params = two_params(WeightStorage::Fp32Master);
  AdamW optimizer(params);
  set_grads(params, 0);
  ASSERT_TRUE(optimizer.step({}).stepped());
  const StateDict saved = optimizer.state_dict();
  const auto moment = saved.tensor("param.p700.first_moment").clone();
  ASSERT_TRUE(optimizer.step({}).stepped());
  EXPECT_TRUE(bit_equal(saved.tensor("param.p700.first_moment"), moment));
}

TEST(OptimizerState, ThatDoesNotFitIsRefusedWholeWithAllFaults) {
  const auto params = two_params(WeightStorage::Fp32Master);
  AdamW optimizer(params);
  set_grads(params, 0);
  ASSERT_TRUE(optimizer.step({}).stepped());
  const StateDict good = optimizer.state_dict();

  StateDict bad = good;
  bad.set("param.p700.first_moment", torch::zeros({701}));
  bad.set("param.p33.second_moment", torch::zeros({33}, at::kHalf));
  bad.set("param.p33.steps", int64_t{-4});
  const auto message = error_of([&] { optimizer.load_state_dict(bad); });
  for (const char* part : {"'param.p700.first_moment' is Float of shape [701], expected Float of shape [700]",
                           "'param.p33.second_moment' is Half", "'param.p33.steps' is -4"})
    EXPECT_NE(message.find(part), std::string::npos) << message;

  StateDict incomplete;
  incomplete.set("steps", int64_t{1});
  incomplete.set("stepz", int64_t{1});
  const auto names = error_of([&] { optimizer.load_state_dict(incomplete); });
  EXPECT_NE(names.find("Unknown: 'stepz'"), std::string::npos) << names;
  EXPECT_NE(names.find("param.p33.first_moment"), std::string::npos) << names;
  EXPECT_NE(error_of([&] {
              SGD(params, {.momentum = 0.9}).load_state_dict(good);
            }).find("SGD: the saved state is of AdamW"),
            std::string::npos);
  expect_same_state(good, optimizer.state_dict());
}

}  // namespace
}  // namespace halfstep
