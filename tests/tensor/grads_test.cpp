// The read-only look at gradients.
#include <gtest/gtest.h>
#include <halfstep/grads.h>
#include <torch/torch.h>

#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::error_of;

Param with_grad(const char* name, const torch::Tensor& grad) {
  const Param param = make_param(name, torch::zeros(grad.sizes()), WeightStorage::Fp32, at::kFloat);
  param.working.mutable_grad() = grad;
  return param;
}

TEST(InspectGrads, NormOfFp16GradientsDoesNotOverflow) {
  const Param param = with_grad("w", torch::full({100}, 60000.0, at::kHalf));
  EXPECT_DOUBLE_EQ(inspect_grads({param}).norm(), 600000.0);  // 60000 = 1875 * 32 is an FP16 number
}

// Four ranks have summed: the mean has a quarter of the norm, and that is what is clipped.
TEST(GradMultiplier, ClipsWhatTheFactorLeaves) {
  const Param mean = with_grad("w", torch::full({4}, 3.0)), sum = with_grad("w", torch::full({4}, 12.0));
  for (const double max_norm : {100.0, 6.0, 1.5})
    EXPECT_NEAR(inspect_grads({sum}).clipped_to(max_norm).times(0.25).value() * 12,
                inspect_grads({mean}).clipped_to(max_norm).value() * 3, 1e-12)
        << max_norm;
  EXPECT_NE(error_of([&] { (void)GradMultiplier(inspect_grads({mean}), NAN); }).find("expected a positive"),
            std::string::npos);
}

TEST(InspectGrads, ParameterThatIsListedTwiceCountsOnce) {
  const Param param = with_grad("w", torch::full({4}, 3.0));
  EXPECT_DOUBLE_EQ(inspect_grads({param, param}).norm(), 6.0);
}

TEST(InspectGrads, GradientWhoseSquareLeavesFp32IsNotFinite) {
  const Param small = with_grad("small", torch::ones({3})),
              large = with_grad("large", torch::full({1}, 0x1p63));
  EXPECT_TRUE(inspect_grads({large}).finite());
  const auto grads = inspect_grads({small, large});  // sqrt(3 + 2^126) rounds to 2^63 exactly
  EXPECT_TRUE(grads.finite());
  large.working.mutable_grad() = torch::full({1}, 0x1.1p63);
  const auto beyond = inspect_grads({small, large});
  EXPECT_FALSE(beyond.finite());
  EXPECT_EQ(beyond.first_bad(), "large");
  EXPECT_TRUE(inspect_grads({small, large}, 2.0).finite());  // un-scaled it fits
}

TEST(InspectGrads, ClippingIsTorchsFactor) {
  for (const double size : {0.01, 0.5, 1.0, 7.0, 1e6}) {
    const auto grad = torch::full({16}, size);
    const Param param = with_grad("w", grad);
    auto theirs = torch::zeros({16}).requires_grad_();
    theirs.mutable_grad() = grad.clone();
    torch::nn::utils::clip_grad_norm_(theirs, 2.0);
    const double factor = inspect_grads({param}).clipped_to(2.0).value();
    // Torch divides and multiplies in FP32: three roundings.
    EXPECT_NEAR(theirs.grad()[0].item<double>(), factor * grad[0].item<double>(), 4 * 0x1p-24 * size) << size;
  }
}

TEST(InspectGrads, MultiplierUnscalesAndClipsAtOnce) {
  const Param param = with_grad("w", torch::full({4}, 1024.0));
  const auto grads = inspect_grads({param}, 256.0);
  EXPECT_DOUBLE_EQ(grads.norm(), 8.0);
  EXPECT_DOUBLE_EQ(grads.unclipped().value(), 1.0 / 256);
  EXPECT_DOUBLE_EQ(grads.clipped_to(100.0).value(), 1.0 / 256);
  EXPECT_NEAR(grads.clipped_to(2.0).value(), 1.0 / 1024, 1e-9);
  EXPECT_NE(error_of([&] { (void)grads.clipped_to(0.0); }).find("max_norm is 0"), std::string::npos);
  EXPECT_NE(error_of([&] { (void)inspect_grads({param}, NAN); }).find("loss_scale is nan"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
