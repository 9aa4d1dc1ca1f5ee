// An Inf or NaN in any element of any gradient is found, its parameter named, and nothing is changed.
#include <gtest/gtest.h>
#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <limits>

#include "support/bits.h"
#include "support/faults.h"

namespace halfstep {
namespace fault_test {

using testing::bit_equal;
using testing::fault_shapes;
using testing::GradLayout;

constexpr int kTensors = 30;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Model {
  std::vector<torch::Tensor> params;
  std::unique_ptr<torch::optim::Adam> optimizer;
};

Model make_model(at::ScalarType type) {
  Model model;
  for (const auto& shape : fault_shapes())
    model.params.push_back(torch::randn(shape).to(type).requires_grad_());
  model.optimizer =
      std::make_unique<torch::optim::Adam>(model.params, torch::optim::AdamOptions(1e-2).eps(1e-4));
  return model;
}

std::vector<torch::Tensor> everything(Model& model) {
  std::vector<torch::Tensor> tensors;
  for (const auto& p : model.params) {
    tensors.push_back(p.detach());
    const auto found = model.optimizer->state().find(p.unsafeGetTensorImpl());
    if (found == model.optimizer->state().end()) continue;
    const auto& state = static_cast<const torch::optim::AdamParamState&>(*found->second);
    tensors.insert(tensors.end(), {state.exp_avg(), state.exp_avg_sq(), torch::tensor(state.step())});
  }
  return tensors;
}

class Faults : public ::testing::TestWithParam<std::tuple<at::ScalarType, GradLayout>> {};

TEST_P(Faults, EveryOneIsFoundNamedAndSkippedWithoutATrace) {
  const auto [type, layout] = GetParam();
  torch::manual_seed(3);
  auto model = make_model(type);
  ASSERT_EQ(model.params.size(), kTensors);
  GradScaler scaler({.initial = 4.0, .max_consecutive_skips = 0});
  std::vector<torch::Tensor> clean_grads;
  for (const auto& p : model.params) clean_grads.push_back(torch::randn(p.sizes()).to(type));
  auto set_grads = [&, layout = layout] {
    for (int i = 0; i < kTensors; ++i)
      model.params[i].mutable_grad() = testing::laid_out(clean_grads[i], layout);
  };

  int cases = 0;
  for (int step = 0; step < 4; ++step) {  // before the first update, and after 1, 2 and 3 of them
    if (step > 0) {
      set_grads();
      ASSERT_TRUE(scaler.step(*model.optimizer).stepped());
      scaler.update();
    }
    std::vector<torch::Tensor> before;
    for (const auto& tensor : everything(model)) before.push_back(tensor.clone());
    for (int victim = 0; victim < kTensors; ++victim) {
      const int64_t elements = model.params[victim].numel();
      for (const int64_t position : {int64_t{0}, elements / 2, elements - 1}) {
        for (const float fault : {kNan, kInf, -kInf}) {
          set_grads();
          testing::element_of(model.params[victim].mutable_grad(), position).fill_(fault);

          const auto report = scaler.step(*model.optimizer);
          scaler.update(4.0);
          ++cases;
          ASSERT_EQ(report.outcome(), StepOutcome::SkippedNonFinite)
              << "missed " << fault << " in tensor " << victim;
          ASSERT_EQ(report.parameter(), detail::concat("parameter ", victim, " (group 0, shape ",
                                                       model.params[victim].sizes(), ")"));
          const auto now = everything(model);
          ASSERT_EQ(now.size(), before.size());
          for (size_t i = 0; i < now.size(); ++i) ASSERT_TRUE(bit_equal(now[i], before[i])) << "tensor " << i;
        }
      }
    }
  }
  EXPECT_EQ(cases, 4 * kTensors * 3 * 3);
  RecordProperty("cases", cases);
}

std::string name_of_case(const ::testing::TestParamInfo<Faults::ParamType>& info) {
  const auto [type, layout] = info.param;
  return std::string(c10::toString(type)) + testing::name_of(layout);
}

// 4 types x 3 layouts x 1,080 = 12,960 cases; parameters of zero dimensions are among the thirty.
INSTANTIATE_TEST_SUITE_P(
    EveryTypeAndLayout, Faults,
    ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble),
                       ::testing::Values(GradLayout::Contiguous, GradLayout::Transposed, GradLayout::Sliced)),
    name_of_case);

}  // namespace fault_test
}  // namespace halfstep
