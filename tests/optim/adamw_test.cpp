// halfstep::AdamW against LibTorch's own fused AdamW and against FP64.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::error_of;
using testing::most_ulps_apart;

std::vector<torch::Tensor> random_tensors(double spread) {
  std::vector<torch::Tensor> tensors;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {1}, {17}, {64, 33}, {3, 5, 7}, {40000}})
    tensors.push_back(torch::randn(shape) * spread);
  return tensors;
}

/// LibTorch's fused AdamW over FP32 tensors, with its own state.
struct EngineAdamW {
  std::vector<torch::Tensor> params, first, second, steps;
  explicit EngineAdamW(const std::vector<torch::Tensor>& initial) {
    for (const auto& tensor : initial) {
      params.push_back(tensor.clone());
      first.push_back(torch::zeros_like(tensor));
      second.push_back(torch::zeros_like(tensor));
      steps.push_back(torch::zeros({}));
    }
  }
  void step(const std::vector<torch::Tensor>& grads, const AdamWOptions& o) {
    for (auto& step : steps) step += 1;
    at::_fused_adamw_(params, grads, first, second, {}, steps, o.lr, o.betas[0], o.betas[1], o.weight_decay,
                      o.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
};

std::vector<Param> params_of(const std::vector<torch::Tensor>& initial, WeightStorage storage,
                             at::ScalarType low = at::kBFloat16) {
  std::vector<Param> params;
  for (size_t i = 0; i < initial.size(); ++i)
    params.push_back(make_param(detail::concat("p", i), initial[i].clone().requires_grad_(), storage, low));
  return params;
}

class OverHundredSteps : public ::testing::TestWithParam<WeightStorage> {};

// Same order of operations, same roundings: not one bit differs.
TEST_P(OverHundredSteps, Fp32MastersHaveTheBitsOfTheEnginesFusedAdamW) {
  for (const AdamWOptions& options :
       {AdamWOptions{.lr = 1e-2}, AdamWOptions{.lr = 3e-4, .betas = {0.8, 0.95}, .weight_decay = 0.1},
        AdamWOptions{.lr = 1e-3, .betas = {0.4, 0.999}, .eps = 1e-4, .weight_decay = 0.0}}) {
    torch::manual_seed(5);
    const auto initial = random_tensors(1.0);
    EngineAdamW engine(initial);
    const auto params = params_of(initial, GetParam());
    AdamW optimizer(params, options);
    for (int step = 0; step < 100; ++step) {
      const auto grads = random_tensors(std::pow(10.0, step % 7 - 5));
      engine.step(grads, options);
      for (size_t i = 0; i < params.size(); ++i) params[i].working.mutable_grad() = grads[i];
      ASSERT_TRUE(optimizer.step({}).stepped());
    }
    const StateDict state = optimizer.state_dict();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto moment = [&](const char* name) {
        return state.tensor("param." + params[i].name + "." + name);
      };
      EXPECT_EQ(most_ulps_apart(full_precision(params[i]), engine.params[i]), 0) << params[i].name;
      EXPECT_EQ(most_ulps_apart(moment("first_moment"), engine.first[i]), 0) << params[i].name;
      // The engine updates the second moment of the last numel % 8 elements with one rounding more.
      const int64_t whole = params[i].working.numel() / 8 * 8;
      EXPECT_EQ(most_ulps_apart(moment("second_moment").flatten().slice(0, 0, whole),
                                engine.second[i].flatten().slice(0, 0, whole)),
                0)
          << params[i].name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(WithFp32, OverHundredSteps,
                         ::testing::Values(WeightStorage::Fp32, WeightStorage::Fp32Master,
                                           WeightStorage::SplitMaster));

TEST(AdamW, WorkingCopyIsTheMasterRoundedAsTheEngineRounds) {
  torch::manual_seed(6);
  const auto initial = random_tensors(1.0);
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    const auto params = params_of(initial, WeightStorage::Fp32Master, low);
    AdamW optimizer(params, {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      for (const auto& param : params)
        param.working.mutable_grad() = torch::randn(param.working.sizes()).to(low);
      ASSERT_TRUE(optimizer.step({}).stepped());
      for (const auto& param : params)
        EXPECT_TRUE(bit_equal(param.working, param.master.to(low))) << param.name;
    }
  }
}

TEST(AdamW, MultiplierIsTheSameAsMultipliedGradientsAndLeavesThemAlone) {
  torch::manual_seed(7);
  const auto initial = random_tensors(1.0);
  const auto grads = random_tensors(100.0);
  const auto multiplied = params_of(initial, WeightStorage::Fp32Master);
  const auto by_number = params_of(initial, WeightStorage::Fp32Master);
  for (size_t i = 0; i < initial.size(); ++i) {
    multiplied[i].working.mutable_grad() = grads[i] * 0.01f;
    by_number[i].working.mutable_grad() = grads[i].clone();
  }
  AdamW first(multiplied), second(by_number);
  ASSERT_TRUE(first.step({}).stepped());
  ASSERT_TRUE(second.step(GradMultiplier().times(0.01)).stepped());
  for (size_t i = 0; i < initial.size(); ++i) {
    EXPECT_TRUE(bit_equal(by_number[i].working.grad(), grads[i]));
    EXPECT_TRUE(bit_equal(by_number[i].master, multiplied[i].master));
  }
}

TEST(AdamW, ResultsDoNotDependOnTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  std::vector<std::vector<torch::Tensor>> results;
  for (const int count : {1, 2, 5}) {
    at::set_num_threads(count);
    torch::manual_seed(8);
    const auto params = params_of({torch::randn({100003})}, WeightStorage::Stochastic);
    AdamW optimizer(params, {.lr = 1e-3, .moments = MomentStorage::Blockwise8}, /*seed=*/3);
    double norm = 0;
    for (int step = 0; step < 3; ++step) {
      params[0].working.mutable_grad() = torch::randn({100003}).to(at::kBFloat16);
      const auto grads = inspect_grads(params);
      norm = grads.norm();
      ASSERT_TRUE(optimizer.step(grads.clipped_to(1.0)).stepped());
    }
    results.push_back({params[0].working, torch::tensor(norm, torch::kDouble)});
  }
  at::set_num_threads(threads);
  for (const auto& other : {results[1], results[2]})
    for (size_t i = 0; i < other.size(); ++i) EXPECT_TRUE(bit_equal(results[0][i], other[i]));
}

// The engine counts a parameter's steps from its first gradient, and so must the bias correction here.
TEST(AdamW, ParameterWithoutAGradientIsLeftAloneAndCountsNoStep) {
  torch::manual_seed(9);
  const std::vector<torch::Tensor> initial = {torch::randn({9}), torch::randn({9})};
  const auto params = params_of(initial, WeightStorage::Fp32Master);
  AdamW optimizer(params, {.lr = 0.1});
  for (int step = 0; step < 3; ++step) {
    params[0].working.mutable_grad() = torch::ones({9});
    ASSERT_EQ(optimizer.step({}, {.stalls = true}).stalls().size(), 1u);
  }
  EXPECT_TRUE(bit_equal(params[1].master, initial[1]));
  optimizer.zero_grad();
  const auto grad = torch::randn({9});
  params[1].working.mutable_grad() = grad;
  ASSERT_TRUE(optimizer.step({}).stepped());
  EngineAdamW engine({initial[1]});
  engine.step({grad}, {.lr = 0.1});
  EXPECT_TRUE(bit_equal(params[1].master, engine.params[0]));
}

TEST(AdamW, StepWithNoGradientsAtAllSaysSo) {
  const auto params = params_of({torch::randn({4})}, WeightStorage::Fp32);
  AdamW optimizer(params);
  EXPECT_EQ(optimizer.step(inspect_grads(params).unclipped()).outcome(), StepOutcome::SkippedNoGradients);
  EXPECT_EQ(optimizer.steps(), 0);
}

TEST(AdamW, UpdateIsSeenByAutogradAsAnInPlaceChange) {
  const auto params = params_of({torch::randn({4, 4})}, WeightStorage::SplitMaster);
  AdamW optimizer(params);
  // y's graph has saved the weight; after a step, backward through it would use the new one.
  const auto y = torch::mm(torch::ones({4, 4}, at::kBFloat16), params[0].working);
  const auto loss = torch::mm(y, params[0].working).sum();
  params[0].working.mutable_grad() = torch::ones({4, 4}, at::kBFloat16);
  ASSERT_TRUE(optimizer.step({}).stepped());
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(AdamW, MultiplierThatFp32CannotHoldIsRefused) {
  const auto params = params_of({torch::ones({4})}, WeightStorage::Fp32);
  AdamW optimizer(params);
  params[0].working.mutable_grad() = torch::zeros({4});
  for (const double value : {1e39, 0x1p-151, 0x1p-127, -1.0, static_cast<double>(NAN)})
    EXPECT_NE(error_of([&] {
                (void)optimizer.step(GradMultiplier().times(value));
              }).find("the gradient multiplier is"),
              std::string::npos);
  EXPECT_TRUE(bit_equal(params[0].working, torch::ones({4})));
}

TEST(AdamW, OptionsThatMakeNoSenseAreRefusedByName) {
  const auto params = params_of({torch::randn({4})}, WeightStorage::Fp32);
  const auto refused = [&](const char* what, AdamWOptions options) {
    const auto message = error_of([&] { AdamW(params, options); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  refused("lr is -1", {.lr = -1});
  refused("lr is nan", {.lr = NAN});
  refused("beta1 is 1", {.betas = {1, 0.999}});
  refused("beta2 is -0.5", {.betas = {0.9, -0.5}});
  refused("eps is inf", {.eps = INFINITY});
  refused("eps is 0", {.eps = 0});  // a weight without gradients would become 0 / 0
  refused("lr is 1e+39", {.lr = 1e39});
  refused("weight_decay is -0.1", {.weight_decay = -0.1});
}

}  // namespace
}  // namespace halfstep
