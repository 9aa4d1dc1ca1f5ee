// A Shadow computes what other precisions would make of each layer's products, and changes no bit of the run.
#include <gtest/gtest.h>
#include <halfstep/shadow.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/small_models.h"

namespace halfstep {
namespace shadow_test {

using testing::bit_equal;
using testing::kAnyMachine;
using testing::Mlp;

constexpr int64_t kWide = 32, kRows = 48;

std::shared_ptr<Mlp> fresh_model() {
  torch::manual_seed(1);
  return std::make_shared<Mlp>(kWide, kWide, kWide);
}

at::Tensor batch_loss(Mlp& model, int number) {
  torch::manual_seed(100 + number);
  return model.loss(torch::randn({kRows, kWide}), torch::randint(kWide, {kRows}));
}

std::vector<ShadowedPrecision> all_precisions() {
  return {{"bf16", Precision::bf16()},
          {"fp16", Precision::fp16()},
          {"fp8-delayed", Precision::fp8_delayed()},
          {"fp8-current", Precision::fp8_current()},
          {"fp8-block", Precision::fp8_block()},
          {"mxfp8", Precision::mxfp8()},
          {"nvfp4", Precision::nvfp4()}};
}

TEST(Shadow, ChangesNoBit) {
  std::vector<at::Tensor> ends[2];
  std::vector<double> losses[2];
  for (const bool shadowed : {false, true}) {
    auto model = fresh_model();
    TrainStep step(Precision::fp32(), *model, AdamWOptions{.lr = 1e-2}, {.micro_batches = 2});
    std::optional<Shadow> shadow;
    if (shadowed)
      shadow.emplace(step.mixed_precision(), ShadowOptions{.precisions = all_precisions(), .every = 2});
    for (int number = 1; number <= 6; ++number)
      (void)step([&] {
        const at::Tensor loss = batch_loss(*model, number);
        losses[shadowed].push_back(loss.item<double>());
        return loss;
      });
    if (shadow) {
      EXPECT_FALSE(shadow->take().empty());
    }
    for (const Param& param : step.mixed_precision().params())
      ends[shadowed].push_back(param.working.clone());
  }
  EXPECT_EQ(losses[0], losses[1]);
  for (std::size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(bit_equal(ends[0][i], ends[1][i]));
}

TEST(Shadow, LooksAtTheFirstStepAndEachThatItsNumberDividesAndLeavesOutWhatARecipeKeepsHigh) {
  auto model = fresh_model();
  TrainStep step(Precision::fp32(), *model, AdamWOptions{.lr = 1e-2});
  Shadow shadow(step.mixed_precision(), {.precisions = all_precisions(), .every = 3});
  std::map<int64_t, std::map<std::string, std::vector<std::string>>> seen;
  for (int number = 1; number <= 7; ++number) {
    (void)step([&] { return batch_loss(*model, number); });
    for (const ShadowRecord& record : shadow.take())
      seen[record.step][record.precision].push_back(record.layer);
  }
  ASSERT_EQ(seen.size(), 3u);
  const std::vector<std::string> all = {"body.0.weight", "body.2.weight", "body.4.weight"};
  for (const int64_t at : {1, 3, 6}) {
    ASSERT_EQ(seen[at].size(), all_precisions().size());
    for (const auto& [precision, layers] : seen[at])
      // Recipes keep the first and the last linear layer high.
      EXPECT_EQ(layers, precision == "bf16" || precision == "fp16" ? all : std::vector<std::string>{all[1]})
          << precision;
  }
}

/// Rounded to a format of LibTorch's own, in FP64.
at::Tensor rounded(const at::Tensor& tensor, at::ScalarType type) { return tensor.to(type).to(at::kDouble); }

/// One scale for all, which makes the largest magnitude the format's.
at::Tensor scaled_and_rounded(const at::Tensor& tensor, at::ScalarType type, double largest) {
  const double scale = largest / tensor.abs().max().item<double>();
  return (tensor.to(at::kFloat) * static_cast<float>(scale)).to(type).to(at::kDouble) /
         static_cast<float>(scale);
}

double error_of(const at::Tensor& other, const at::Tensor& exact) {
  return ((other - exact).norm() / exact.norm()).item<double>();
}

/// The oracle: operands and gradients of the middle layer, taken from autograd; formats and products
/// LibTorch's in FP64.
TEST(Shadow, ErrorsAreThoseOfTheFormatsProducts) {
  auto model = fresh_model();
  MixedPrecision mp(Precision::fp32(), *model);
  Shadow shadow(mp, {.precisions = {{"bf16", Precision::bf16()}, {"fp8-current", Precision::fp8_current()}}});
  auto* const layer = model->body[2]->as<torch::nn::Linear>();
  torch::manual_seed(7);
  const at::Tensor x = torch::randn({kRows, kWide}), target = torch::randint(kWide, {kRows});
  mp.backward(mp.forward([&] { return model->loss(x, target); }));
  // The same forward without a shadow in the way.
  const at::Tensor input = at::gelu(model->body[0]->as<torch::nn::Linear>()->forward(x)).detach();
  const at::Tensor output = torch::linear(input, layer->weight).detach().requires_grad_();
  torch::nn::functional::cross_entropy(
      model->body[4]->as<torch::nn::Linear>()->forward(at::gelu(output + layer->bias.detach())), target)
      .backward();
  const at::Tensor dy = output.grad().to(at::kDouble), w = layer->weight.detach();
  const GradSummary grads = mp.inspect_grads();
  const double whole_norm = grads.norm();
  mp.advance(grads);

  const at::Tensor exact_y = input.to(at::kDouble).mm(w.to(at::kDouble).t()),
                   exact_dx = dy.mm(w.to(at::kDouble)), exact_dw = dy.t().mm(input.to(at::kDouble));
  int compared = 0;
  for (const ShadowRecord& record : shadow.take()) {
    if (record.layer != "body.2.weight") continue;
    ++compared;
    const bool is_bf16 = record.precision == "bf16";
    const at::Tensor dy_low = rounded(dy, at::kBFloat16);  // it comes in the type of the output
    const auto operand = [&](const at::Tensor& tensor) {
      return is_bf16 ? rounded(tensor, at::kBFloat16) : scaled_and_rounded(tensor, at::kFloat8_e4m3fn, 448);
    };
    const auto gradient = [&] {
      return is_bf16 ? dy_low : scaled_and_rounded(dy_low, at::kFloat8_e5m2, 57344);
    };
    const at::Tensor y = rounded(operand(input).mm(operand(w).t()), at::kBFloat16);
    at::Tensor dx = gradient().mm(operand(w)), dw = gradient().t().mm(operand(input));
    // BF16's products put out BF16; a recipe's gradients come in the types of what they belong to, FP32.
    if (is_bf16) dx = rounded(dx, at::kBFloat16), dw = rounded(dw, at::kBFloat16);
    // Sums of 48 products in another order differ by 48 * 2^-24 of their size, which moves a rounding to
    // BF16, steps of 2^-8, in less than one element of a hundred, by a step that is at most twice its own
    // error.
    const double bound = 0.02;
    EXPECT_NEAR(record.output_error / error_of(y, exact_y), 1, bound) << record.precision;
    EXPECT_NEAR(record.input_grad_error / error_of(dx, exact_dx), 1, bound) << record.precision;
    EXPECT_NEAR(record.weight_grad_error / error_of(dw, exact_dw), 1, bound) << record.precision;
    EXPECT_NEAR(record.forward_noise / ((y - exact_y) * dy).norm().item<double>(), 1, bound);
    EXPECT_NEAR(record.backward_noise / ((dx - exact_dx) * input).norm().item<double>(), 1, bound);
    EXPECT_NEAR(record.gradient_share / ((dw - exact_dw).norm().item<double>() / whole_norm), 1, bound);
  }
  EXPECT_EQ(compared, 2);
}

/// With delayed scaling the scale is that of the largest magnitudes before: values that have grown saturate.
TEST(Shadow, DelayedScalesComeFromTheStepsInBetweenToo) {
  const auto error_after = [](double middle_input) {
    auto model = fresh_model();
    MixedPrecision mp(Precision::fp32(), *model);
    Shadow shadow(mp, {.precisions = {{"fp8-delayed", Precision::fp8_delayed()}}, .every = 3});
    double error = 0;
    torch::manual_seed(7);
    const at::Tensor x = torch::randn({kRows, kWide}), target = torch::randint(kWide, {kRows});
    for (const double factor : {1.0, middle_input, 64.0}) {
      mp.backward(mp.forward([&] { return model->loss(x * factor, target); }));
      mp.advance(mp.inspect_grads());
      mp.zero_grad();
      for (const ShadowRecord& record : shadow.take()) error = record.output_error;
    }
    return error;
  };
  // Of the third step: 64 times too large for scales of the first, and just right for those of the second.
  EXPECT_GT(error_after(1.0), 0.5);
  EXPECT_LT(error_after(64.0), 0.1);
}

TEST(Shadow, RefusesWhatItCannotCompare) {
  auto model = fresh_model();
  MixedPrecision low(Precision::bf16(), *model, {.autocast = kAnyMachine});
  EXPECT_THROW(Shadow(low, {.precisions = {{"mxfp8", Precision::mxfp8()}}}), Error);
  auto other = fresh_model();
  MixedPrecision full(Precision::fp32(), *other);
  EXPECT_THROW(Shadow(full, {.precisions = {{"fp32", Precision::fp32()}}}), Error);
  EXPECT_THROW(Shadow(full, {.precisions = {{"mxfp8", Precision::mxfp8()}}, .every = 0}), Error);
}

}  // namespace shadow_test
}  // namespace halfstep
