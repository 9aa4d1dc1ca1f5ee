// An Inf or NaN in any element of any gradient is found, its parameter named, and nothing is changed.
#include <gtest/gtest.h>
#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <limits>

namespace halfstep {
namespace {

constexpr int kTensors = 30;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

enum class Layout { Contiguous, Transposed, Sliced };

// Thirty parameters of every rank from 0 to 4; sizes around the engine's vector widths and their tails.
std::vector<std::vector<int64_t>> shapes() {
  std::vector<std::vector<int64_t>> shapes = {{}, {1}, {2}, {7}, {8}, {9}, {15}, {16}, {17}, {31}};
  for (const int64_t n : {32, 33, 63, 64, 65, 127, 128, 129}) shapes.push_back({n});
  for (const int64_t n : {1, 3, 8, 17}) shapes.push_back({n, 5});
  for (const int64_t n : {2, 16}) shapes.push_back({3, n});
  for (const int64_t n : {2, 5, 8}) shapes.push_back({4, n, 3});
  shapes.push_back({2, 3, 3, 3});
  shapes.push_back({1, 1, 1, 1});
  shapes.push_back({});
  return shapes;
}

torch::Tensor laid_out(const torch::Tensor& values, Layout layout) {
  switch (layout) {
    case Layout::Contiguous:
      return values.clone();
    case Layout::Transposed: {  // dense, with the dimensions stored in reverse; 0- and 1-dim tensors have one
                                // order
      at::DimVector reversed;
      for (int64_t d = values.dim() - 1; d >= 0; --d) reversed.push_back(d);
      return values.permute(reversed).clone(at::MemoryFormat::Contiguous).permute(reversed);
    }
    case Layout::Sliced: {  // every second element of a larger buffer; a 0-dim one sits inside a vector
      auto buffer = torch::zeros({values.numel() * 2 + 1}, values.options());
      auto view = buffer.slice(0, 1, values.numel() * 2 + 1, 2).view(values.sizes());
      return view.copy_(values);
    }
  }
  return {};
}

struct Model {
  std::vector<torch::Tensor> params;
  std::unique_ptr<torch::optim::Adam> optimizer;
};

Model make_model(at::ScalarType type) {
  Model model;
  for (const auto& shape : shapes()) model.params.push_back(torch::randn(shape).to(type).requires_grad_());
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

bool bit_equal(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

class Faults : public ::testing::TestWithParam<std::tuple<at::ScalarType, Layout>> {};

TEST_P(Faults, EveryOneIsFoundNamedAndSkippedWithoutATrace) {
  const auto [type, layout] = GetParam();
  torch::manual_seed(3);
  auto model = make_model(type);
  ASSERT_EQ(model.params.size(), kTensors);
  GradScaler scaler({.initial = 4.0, .max_consecutive_skips = 0});
  std::vector<torch::Tensor> clean_grads;
  for (const auto& p : model.params) clean_grads.push_back(torch::randn(p.sizes()).to(type));
  auto set_grads = [&, layout = layout] {
    for (int i = 0; i < kTensors; ++i) model.params[i].mutable_grad() = laid_out(clean_grads[i], layout);
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
          auto grad = model.params[victim].mutable_grad();
          // By index, not through a flat copy: the fault must land in the strided tensor itself.
          auto element = grad;
          for (int64_t d = 0, rest = position, stride = elements; d < grad.dim(); ++d) {
            stride /= grad.size(d);
            element = element.select(0, rest / stride);
            rest %= stride;
          }
          element.fill_(fault);

          const auto report = scaler.step(*model.optimizer);
          scaler.update(4.0);
          ++cases;
          ASSERT_EQ(report.outcome, StepOutcome::SkippedNonFinite)
              << "missed " << fault << " in tensor " << victim;
          ASSERT_EQ(report.parameter, detail::concat("parameter ", victim, " (group 0, shape ",
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
  const char* layouts[] = {"Contiguous", "Transposed", "Sliced"};
  const auto [type, layout] = info.param;
  return std::string(c10::toString(type)) + layouts[static_cast<int>(layout)];
}

// 4 types x 3 layouts x 1,080 = 12,960 cases; parameters of zero dimensions are among the thirty.
INSTANTIATE_TEST_SUITE_P(
    EveryTypeAndLayout, Faults,
    ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble),
                       ::testing::Values(Layout::Contiguous, Layout::Transposed, Layout::Sliced)),
    name_of_case);

}  // namespace
}  // namespace halfstep
