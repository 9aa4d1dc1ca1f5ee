// A parameter taken into a storage and out again.
#include <gtest/gtest.h>
#include <halfstep/params.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::error_of;

TEST(Param, HoldsTheOriginalAsExactlyAsItsStorageCan) {
  torch::manual_seed(1);
  const auto original =
      torch::randn({37, 11}) * torch::pow(10, torch::randint(-6, 3, {37, 11}).to(at::kFloat));
  // Half a step of what the bits together are: 24 of FP32, 8 of BF16, 8 + 8 with a BF16 compensation.
  const std::tuple<WeightStorage, double> bounds[] = {
      {WeightStorage::Fp32, 0},        {WeightStorage::Fp32Master, 0},      {WeightStorage::SplitMaster, 0},
      {WeightStorage::Kahan, 0x1p-17}, {WeightStorage::Stochastic, 0x1p-8}, {WeightStorage::Nearest, 0x1p-8}};
  for (const auto& [storage, bound] : bounds) {
    const auto parameter = original.clone().requires_grad_();
    const Param param = make_param("w", parameter, storage, at::kBFloat16);
    EXPECT_TRUE(param.working.is_same(parameter)) << to_string(storage);
    EXPECT_EQ(parameter.scalar_type(), storage == WeightStorage::Fp32 ? at::kFloat : at::kBFloat16);
    const auto error = (full_precision(param) - original).abs() / original.abs();
    EXPECT_LE(error.max().item<double>(), bound) << to_string(storage);

    const auto other = torch::randn({11, 37}).t();
    set_full_precision(param, other);
    const auto other_error = (full_precision(param) - other).abs() / other.abs();
    EXPECT_LE(other_error.max().item<double>(), bound) << to_string(storage);
  }
}

TEST(Param, WritingValuesIsSeenByAutograd) {
  const Param param = make_param("w", torch::ones({3, 3}).requires_grad_(), WeightStorage::Fp32, at::kFloat);
  const auto loss = param.working.mm(param.working).sum();
  set_full_precision(param, torch::zeros({3, 3}));
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(Param, ValuesBeyondTheLowTypeAreRefusedWithTheLargest) {
  auto large = torch::ones({70000});
  large[69999] = -70000.0;
  const auto message = error_of([&] { (void)make_param("w", large, WeightStorage::Fp32Master, at::kHalf); });
  EXPECT_NE(message.find("'w' holds a value of magnitude 70000; the largest in Half is 65504"),
            std::string::npos)
      << message;
  EXPECT_EQ(large.scalar_type(), at::kFloat);
  EXPECT_NO_THROW((void)make_param("w", large, WeightStorage::Fp32Master, at::kBFloat16));
  const Param fits = make_param("w", torch::ones({2}), WeightStorage::Fp32Master, at::kHalf);
  EXPECT_NE(error_of([&] { set_full_precision(fits, torch::full({2}, 1e6)); }).find("largest in Half"),
            std::string::npos);
  EXPECT_NE(error_of([&] { set_full_precision(fits, torch::full({2}, INFINITY)); }).find("Inf or a NaN"),
            std::string::npos);
  EXPECT_NE(error_of([&] { set_full_precision(fits, torch::ones({3})); }).find("has shape [2]"),
            std::string::npos);
}

TEST(Param, NeedsAName) {
  EXPECT_NE(error_of([] {
              (void)make_param("", torch::ones({2}), WeightStorage::Fp32, at::kFloat);
            }).find("no name"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
