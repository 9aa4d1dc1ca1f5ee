// RMS norm of low-precision rows inside an AutocastScope.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

namespace halfstep::testing {
namespace rms_norm_test {

constexpr int64_t kRows = 150, kWidth = 96;

AutocastScope scope_of(at::ScalarType low) {
  return AutocastScope(low, OpPolicy::standard(), {.allow_emulated = true});
}

struct Result {
  at::Tensor output, input_grad, gain_grad;
};

/// The norm of the same numbers, with the gradients of a weighted sum. In FP64 outside of a scope: the
/// oracle.
Result norm_of(const at::Tensor& rows, const at::Tensor& gains, std::optional<double> eps, bool in_scope) {
  const at::ScalarType type = in_scope ? rows.scalar_type() : at::kDouble;
  const at::Tensor x = rows.to(type).detach().requires_grad_();
  const at::Tensor gain = gains.to(in_scope ? gains.scalar_type() : at::kDouble).detach().requires_grad_();
  at::Tensor output;
  if (in_scope) {
    const auto scope = scope_of(rows.scalar_type());
    output = at::rms_norm(x, {x.size(-1)}, gain, eps);
  } else {
    output = at::rms_norm(x, {x.size(-1)}, gain, eps);
  }
  const at::Tensor weights = at::linspace(-1, 1, output.numel(), at::kDouble).reshape(output.sizes());
  const auto grads = torch::autograd::grad({(output.to(at::kDouble) * weights).sum()}, {x, gain});
  return {output.detach(), grads[0], grads[1]};
}

double largest(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

at::Tensor some_rows(at::ScalarType type, at::IntArrayRef sizes = {kRows, kWidth}) {
  at::manual_seed(7);
  return at::randn(sizes, at::kDouble).mul_(3).to(type);
}

// Bounds: the kernel's roundings are those of tests/kernels/norm_test.cpp. Here the largest element of each
// tensor stands for all, with 2^-20 of it for FP32's and one unit of the low format where it is rounded to.
TEST(LowRowsRmsNorm, IsFp32sNormOfTheLowRows) {
  for (const auto low : {at::kBFloat16, at::kHalf})
    for (const auto gain_type : {at::kFloat, low})
      for (const std::optional<double> eps : {std::optional(1e-3), std::optional<double>()}) {
        const at::Tensor gain = at::linspace(0.5, 1.5, kWidth).to(gain_type), x = some_rows(low);
        // Without an eps stock takes the machine epsilon of the type in which it runs: FP32's here.
        const double oracle_eps = eps.value_or(std::numeric_limits<float>::epsilon());
        const Result here = norm_of(x, gain, eps, true), exact = norm_of(x, gain, oracle_eps, false);
        EXPECT_EQ(here.output.scalar_type(), at::kFloat);
        EXPECT_EQ(here.input_grad.scalar_type(), low);
        EXPECT_EQ(here.gain_grad.scalar_type(), gain_type);
        const double unit = low == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
        const auto size = [](const at::Tensor& t) { return t.abs().max().item<double>(); };
        EXPECT_LE(largest(here.output, exact.output), 0x1p-20 * size(exact.output));
        EXPECT_LE(largest(here.input_grad, exact.input_grad), unit * size(exact.input_grad));
        EXPECT_LE(largest(here.gain_grad, exact.gain_grad),
                  (gain_type == at::kFloat ? 0x1p-18 : unit) * size(exact.gain_grad));
      }
}

TEST(LowRowsRmsNorm, HasTheSameBitsWithAnyNumberOfThreads) {
  const at::Tensor gain = at::linspace(0.5, 1.5, kWidth), x = some_rows(at::kBFloat16, {3000, kWidth});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Result one = norm_of(x, gain, 1e-5, true);
  at::set_num_threads(2);
  const Result two = norm_of(x, gain, 1e-5, true);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one.output, two.output));
  EXPECT_TRUE(at::equal(one.input_grad, two.input_grad));
  EXPECT_TRUE(at::equal(one.gain_grad, two.gain_grad));
}

// What the kernel does not take goes through LibTorch's own operations.
TEST(LowRowsRmsNorm, OtherArgumentsGoTheUsualWay) {
  const auto scope = scope_of(at::kBFloat16);
  const at::Tensor x = some_rows(at::kBFloat16, {6, 8, kWidth});
  const auto expect_near = [](const at::Tensor& a, const at::Tensor& b) {
    EXPECT_EQ(a.scalar_type(), at::kFloat);
    EXPECT_LE(largest(a, b), 0x1p-20 * b.abs().max().item<double>());
  };
  expect_near(at::rms_norm(x, {8, kWidth}, {}, 1e-3), at::rms_norm(x.to(at::kDouble), {8, kWidth}, {}, 1e-3));
  const at::Tensor across = x.transpose(0, 2);
  expect_near(at::rms_norm(across, {6}, {}, 1e-3), at::rms_norm(across.to(at::kDouble), {6}, {}, 1e-3));
  EXPECT_EQ(at::rms_norm(x.narrow(0, 0, 0), {kWidth}).sizes(), (at::IntArrayRef{0, 8, kWidth}));
}

TEST(LowRowsRmsNorm, WithoutAGainItHasNone) {
  const auto scope = scope_of(at::kBFloat16);
  const at::Tensor x = some_rows(at::kBFloat16).requires_grad_();
  EXPECT_TRUE(at::equal(at::rms_norm(x, {kWidth}), at::rms_norm(x, {kWidth}, at::ones(kWidth))));
}

TEST(LowRowsRmsNorm, CanBeDifferentiatedTwice) {
  const auto second = [](bool in_scope) {
    const at::Tensor x =
        some_rows(at::kHalf, {4, 16}).to(in_scope ? at::kHalf : at::kDouble).requires_grad_();
    std::optional<AutocastScope> scope;
    if (in_scope) scope.emplace(at::kHalf, OpPolicy::standard(), AutocastOptions{.allow_emulated = true});
    const at::Tensor loss = at::rms_norm(x, {16}, {}, 1e-3).pow(3).sum();
    const at::Tensor first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.to(at::kDouble).pow(2).sum()}, {x})[0].to(at::kDouble);
  };
  const at::Tensor exact = second(false);
  EXPECT_LE(largest(second(true), exact), 8 * 0x1p-11 * exact.abs().max().item<double>());
}

}  // namespace rms_norm_test
}  // namespace halfstep::testing
