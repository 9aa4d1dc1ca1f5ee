// An Inf or NaN in any element of any gradient is found by inspect_grads, its parameter named, and the step
// that follows changes nothing: the matrix of tests/scaling/fault_test.cpp through the fused road.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/faults.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::fault_shapes;
using testing::GradLayout;

struct Scheme {
  const char* name;
  WeightStorage weights;
  MomentStorage moments;
  at::ScalarType low;
};
constexpr Scheme kSchemes[] = {
    {"Fp32", WeightStorage::Fp32, MomentStorage::Fp32, at::kFloat},
    {"SplitBf16", WeightStorage::SplitMaster, MomentStorage::Bf16, at::kBFloat16},
    {"MasterFp16", WeightStorage::Fp32Master, MomentStorage::Fp32, at::kHalf},
    {"KahanBf16", WeightStorage::Kahan, MomentStorage::Blockwise8, at::kBFloat16},
};

std::vector<at::Tensor> everything(const std::vector<Param>& params, const AdamW& optimizer) {
  std::vector<at::Tensor> tensors;
  for (const Param& param : params) {
    tensors.push_back(param.working.detach().clone());
    if (param.master.defined()) tensors.push_back(param.master.clone());
  }
  for (const auto& [name, value] : optimizer.state_dict()) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) tensors.push_back(*tensor);
    if (const auto* number = std::get_if<int64_t>(&value)) tensors.push_back(torch::tensor(*number));
  }
  return tensors;
}

class FusedFaults : public ::testing::TestWithParam<std::tuple<Scheme, GradLayout>> {};

TEST_P(FusedFaults, EveryOneIsFoundNamedAndSkippedWithoutATrace) {
  const auto [scheme, layout] = GetParam();
  torch::manual_seed(3);
  std::vector<Param> params;
  std::vector<at::Tensor> clean_grads;
  for (const auto& shape : fault_shapes()) {
    params.push_back(
        make_param(detail::concat("p", params.size()), torch::randn(shape), scheme.weights, scheme.low));
    clean_grads.push_back(torch::randn(shape).to(scheme.low));
  }
  AdamW optimizer(params, {.lr = 1e-2, .moments = scheme.moments});
  const auto set_grads = [&, layout = layout] {
    for (size_t i = 0; i < params.size(); ++i)
      params[i].working.mutable_grad() = testing::laid_out(clean_grads[i], layout);
  };

  int cases = 0;
  for (int step = 0; step < 4; ++step) {  // before the first update, and after 1, 2 and 3 of them
    if (step > 0) {
      set_grads();
      ASSERT_TRUE(optimizer.step(inspect_grads(params, 4.0).clipped_to(1.0)).stepped());
    }
    const auto before = everything(params, optimizer);
    for (size_t victim = 0; victim < params.size(); ++victim) {
      const int64_t elements = params[victim].working.numel();
      for (const int64_t position : {int64_t{0}, elements / 2, elements - 1}) {
        for (const float fault : {NAN, INFINITY, -INFINITY}) {
          set_grads();
          testing::element_of(params[victim].working.grad(), position).fill_(fault);
          const auto report = optimizer.step(inspect_grads(params, 4.0).clipped_to(1.0));
          ++cases;
          ASSERT_EQ(report.outcome(), StepOutcome::SkippedNonFinite)
              << "missed " << fault << " in " << victim;
          ASSERT_EQ(report.parameter(), params[victim].name);
        }
      }
      // Once a victim, after its nine faults: the comparison is the expensive part.
      const auto now = everything(params, optimizer);
      ASSERT_EQ(now.size(), before.size());
      for (size_t i = 0; i < now.size(); ++i) ASSERT_TRUE(bit_equal(now[i], before[i])) << "tensor " << i;
    }
  }
  EXPECT_EQ(cases, 4 * static_cast<int>(params.size()) * 9);
  RecordProperty("cases", cases);
}

// 4 schemes x 3 layouts x 1,080 = 12,960 cases.
INSTANTIATE_TEST_SUITE_P(EverySchemeAndLayout, FusedFaults,
                         ::testing::Combine(::testing::ValuesIn(kSchemes),
                                            ::testing::Values(GradLayout::Contiguous, GradLayout::Transposed,
                                                              GradLayout::Sliced)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + testing::name_of(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace halfstep
