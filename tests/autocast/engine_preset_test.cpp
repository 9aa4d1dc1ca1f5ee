// Whole models under the `engine` policy: loss and every gradient have the bits of bare at::autocast.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>

#include "support/run_case.h"
#include "support/small_models.h"

namespace halfstep::testing {
namespace {

/// The loss and then the gradients, in the order of the parameters.
template <typename Model, typename OpenRegion>
std::vector<at::Tensor> loss_and_grads(Model& model, const at::Tensor& x, const at::Tensor& y,
                                       OpenRegion open_region) {
  model.zero_grad();
  at::Tensor loss;
  {
    const auto region = open_region();
    loss = model.loss(x, y);
  }
  loss.backward();
  std::vector<at::Tensor> found = {loss.detach()};
  for (const auto& parameter : model.parameters()) found.push_back(parameter.grad().clone());
  return found;
}

template <typename Model>
void expect_bits_of_bare_autocast(Model& model, const at::Tensor& x, const at::Tensor& y) {
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    const auto in_fp32 = loss_and_grads(model, x, y, [] { return std::make_unique<int>(); });
    const auto bare = loss_and_grads(model, x, y, [low] { return std::make_unique<BareAutocast>(low); });
    const auto ours = loss_and_grads(
        model, x, y, [low] { return std::make_unique<AutocastScope>(low, OpPolicy::engine()); });
    EXPECT_FALSE(at::equal(in_fp32[1], bare[1])) << "the comparison must be about low precision";
    for (std::size_t i = 0; i < bare.size(); ++i)
      EXPECT_TRUE(at::equal(ours[i], bare[i])) << low << " at " << i;
  }
}

TEST(EnginePreset, MlpHasTheBitsOfBareAutocast) {
  at::manual_seed(1);
  Mlp model(32, 64, 10);
  expect_bits_of_bare_autocast(model, at::randn({16, 32}), at::randint(10, {16}));
}

TEST(EnginePreset, ConvNetHasTheBitsOfBareAutocast) {
  at::manual_seed(2);
  ConvNet model;
  expect_bits_of_bare_autocast(model, at::randn({8, 1, 12, 12}), at::randint(10, {8}));
}

TEST(EnginePreset, TransformerHasTheBitsOfBareAutocast) {
  at::manual_seed(3);
  Transformer model(/*vocabulary=*/50, /*width=*/32, /*heads=*/4, /*layers=*/1);
  expect_bits_of_bare_autocast(model, at::randint(50, {2, 12}), at::randint(50, {2, 12}));
}

}  // namespace
}  // namespace halfstep::testing
