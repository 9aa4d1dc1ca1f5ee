// TorchScript modules inside a scope.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/python.h"
#include "support/scratch.h"

namespace halfstep::testing {
namespace {

class ScriptedModule : public ::testing::Test {
 protected:
  ScriptedModule() {
    ask_python("tests/autocast/scripted_module.py", {{"path", path_.string()}});
    at::manual_seed(4);
    x_ = at::randn({16, 32});
    target_ = at::randint(5, {16});
  }

  torch::jit::Module load() const { return torch::jit::load(path_.string()); }

  std::vector<at::Tensor> gradients(torch::jit::Module& module, at::ScalarType low) const {
    for (const at::Tensor& parameter : module.parameters()) at::Tensor(parameter).mutable_grad().reset();
    at::Tensor loss;
    {
      const AutocastScope scope(low, OpPolicy::standard(), kAnyMachine);
      loss = at::cross_entropy_loss(module.forward({x_}).toTensor(), target_);
    }
    loss.backward();
    std::vector<at::Tensor> found;
    for (const at::Tensor& parameter : module.parameters()) found.push_back(parameter.grad().clone());
    return found;
  }

  ScratchFolder folder_;
  std::filesystem::path path_ = folder_ / "module.pt";
  at::Tensor x_, target_;
};

// LibTorch optimizes a graph after it has watched one call, so the first iterations prove nothing.
TEST_F(ScriptedModule, HasTheGradientsOfThePlainInterpreterInEveryIteration) {
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> expected;
    {
      const torch::jit::GraphOptimizerEnabledGuard plain(false);
      auto module = load();
      expected = gradients(module, low);
    }
    ASSERT_TRUE(torch::jit::getGraphExecutorOptimize());
    auto module = load();
    for (int iteration = 0; iteration < 10; ++iteration) {
      std::vector<at::Tensor> found;
      ASSERT_NO_THROW(found = gradients(module, low)) << low << ", iteration " << iteration;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], expected[i])) << low << ", iteration " << iteration << ", " << i;
      }
    }
  }
}

TEST_F(ScriptedModule, HasTheSameGradientsInsideACheckpointedRegion) {
  auto module = load();
  const auto expected = gradients(module, at::kBFloat16);
  for (int iteration = 0; iteration < 5; ++iteration) {
    for (const at::Tensor& parameter : module.parameters()) at::Tensor(parameter).mutable_grad().reset();
    at::Tensor loss;
    {
      const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
      const at::Tensor output = checkpoint_activations(
          [module](const at::Tensor& x) mutable { return module.forward({x}).toTensor(); }, x_);
      loss = at::cross_entropy_loss(output, target_);
    }
    loss.backward();
    std::size_t i = 0;
    for (const at::Tensor& parameter : module.parameters()) {
      EXPECT_TRUE(at::equal(parameter.grad(), expected[i])) << iteration << ", " << i;
      ++i;
    }
  }
}

TEST_F(ScriptedModule, IsOptimizedOutsideAsBefore) {
  auto module = load();
  const at::Tensor before = module.forward({x_}).toTensor();
  for (const bool optimize : {true, false}) {
    const torch::jit::GraphOptimizerEnabledGuard chosen(optimize);
    {
      const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
      EXPECT_FALSE(torch::jit::getGraphExecutorOptimize());
      EXPECT_EQ(module.forward({x_}).toTensor().scalar_type(), at::kBFloat16);
    }
    EXPECT_EQ(torch::jit::getGraphExecutorOptimize(), optimize);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(module.forward({x_}).toTensor(), before));
}

}  // namespace
}  // namespace halfstep::testing
