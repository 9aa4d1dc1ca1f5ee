#include <gtest/gtest.h>
#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace halfstep {
namespace {

torch::Tensor with_grad(const torch::Tensor& grad) {
  auto param = torch::zeros(grad.sizes(), grad.options()).requires_grad_();
  param.mutable_grad() = grad;
  return param;
}

TEST(ClipGradNorm, Fp16NormBeyondFp16sRangeIsTakenRightAndClipped) {
  // Four values of 64000: the norm is 128000, FP16 ends at 65504.
  auto p = with_grad(torch::full({4}, 64000.0).to(at::kHalf));
  EXPECT_EQ(clip_grad_norm_({p}, 1.0).item<double>(), 128000.0);
  EXPECT_TRUE(torch::equal(p.grad(), torch::full({4}, 0.5).to(at::kHalf)));

  auto q = with_grad(torch::full({4}, 64000.0).to(at::kHalf));
  torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{q}, 1.0);
  EXPECT_TRUE(torch::equal(q.grad(), torch::zeros({4}, at::kHalf))) << "LibTorch 2.13 zeroes them";
}

TEST(ClipGradNorm, AgreesWithFp64ArithmeticAcrossTypes) {
  torch::manual_seed(7);
  const auto a = torch::randn({33, 5}), b = torch::randn({17}).to(at::kBFloat16),
             c = torch::randn({3}, at::kDouble);
  const double norm =
      std::sqrt(a.to(at::kDouble).square().sum().item<double>() +
                b.to(at::kDouble).square().sum().item<double>() + c.square().sum().item<double>());
  auto p = with_grad(a.clone()), q = with_grad(b.clone()), r = with_grad(c.clone());
  // 185 squares summed in FP64: 2^-53 each way, far below 1e-13.
  EXPECT_NEAR(clip_grad_norm_({p, q, r, torch::zeros({2}).requires_grad_()}, 0.5).item<double>(), norm,
              norm * 1e-13);
  // One rounding of the product to FP32 (2^-24), one of the multiplier (2^-24).
  const auto expected = a.to(at::kDouble) * (0.5 / (norm + 1e-6));
  EXPECT_TRUE(((p.grad().to(at::kDouble) - expected).abs() <= expected.abs() * 0x1p-23).all().item<bool>());
}

TEST(ClipGradNorm, SmallNormsAreLeftAlone) {
  auto p = with_grad(torch::tensor({0.3f, 0.4f}));
  EXPECT_NEAR(clip_grad_norm_({p}, 1.0).item<double>(), 0.5, 1e-7);
  EXPECT_TRUE(torch::equal(p.grad(), torch::tensor({0.3f, 0.4f})));
}

TEST(ClipGradNorm, ANormThatIsNotFiniteLeavesTheEvidence) {
  auto good = with_grad(torch::ones({2}));
  auto bad = with_grad(torch::tensor({1.0f, std::numeric_limits<float>::infinity()}));
  EXPECT_TRUE(std::isinf(clip_grad_norm_({good, bad}, 0.1).item<double>()));
  EXPECT_TRUE(torch::equal(good.grad(), torch::ones({2})));
  EXPECT_EQ(bad.grad()[0].item<float>(), 1.0f);
}

TEST(ClipGradNorm, SparseDuplicatesAreSummedBeforeTheNorm) {
  auto p = torch::zeros({4}).requires_grad_();
  p.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1, 1}}), torch::tensor({3.0f, 1.0f}), {4});
  EXPECT_EQ(clip_grad_norm_({p}, 1.0).item<double>(), 4.0);
}

TEST(ClipGradNorm, ATiedParameterCountsOnce) {
  auto p = with_grad(torch::tensor({4.0f}));
  EXPECT_EQ(clip_grad_norm_({p, p}, 1.0).item<double>(), 4.0);
  EXPECT_NEAR(p.grad().item<float>(), 1.0, 1e-6);  // 1e-6: what clipping adds to the norm
}

TEST(ClipGradNorm, NoGradientsGiveZeroAndABadLimitIsRefused) {
  EXPECT_EQ(clip_grad_norm_({torch::zeros({2}).requires_grad_()}, 1.0).item<double>(), 0.0);
  EXPECT_THROW(clip_grad_norm_({}, 0.0), Error);
  EXPECT_THROW(clip_grad_norm_({}, std::nan("")), Error);
}

}  // namespace
}  // namespace halfstep
