// What a training loop has beside the step, on the test accelerator: compressed and checkpointed activations,
// GradScaler, clip_grad_norm_.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <cmath>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/counting_device.h"
#include "support/small_models.h"

namespace halfstep::testing {
namespace {

using at::Tensor;

/// The gradient of a square is twice what was kept: the kernels' bytes give the kernels' bits.
TEST(DeviceActivations, AreCompressedToTheBytesOfTheKernels) {
  torch::manual_seed(4);
  for (const Format format : {Format::BF16, Format::E4M3, Format::E5M2})
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const int64_t size : {512, 513, 700, 1280})
        for (const bool with_bad : {false, true}) {
          SCOPED_TRACE(::testing::Message() << traits(format).name << " " << type << " " << size);
          // Blocks of all magnitudes, one of zeros, some with what is not finite.
          Tensor values = torch::randn({size}) * torch::exp2(torch::randint(-20, 14, {size}).to(at::kFloat));
          values.slice(0, 128, 256).zero_();
          if (type == at::kFloat) values.slice(0, 256, 384).mul_(0x1p-120);
          if (with_bad) values[3] = INFINITY, values[400] = NAN, values[511] = -INFINITY;
          const auto gradient = [&](at::Device device) {
            const Tensor leaf = values.to(device, type).clone().requires_grad_();
            std::optional<NoWaits> no_waits;
            if (!device.is_cpu()) no_waits.emplace();
            const Tensor x = leaf * 1;
            Tensor loss;
            {
              const CompressedActivations compressed(format);
              loss = (x * x).sum();
            }
            loss.backward();
            return leaf.grad();
          };
          const Tensor here = gradient(at::kCPU), found = peek(gradient(device_under_test()));
          EXPECT_TRUE(found.isnan().equal(here.isnan()));
          EXPECT_TRUE(
              bit_equal(found.nan_to_num(1, INFINITY, -INFINITY), here.nan_to_num(1, INFINITY, -INFINITY)));
        }
}

TEST(DeviceActivations, CheckpointedRegionsHaveTheSameGradients) {
  const auto gradients = [](bool checkpointed) {
    torch::manual_seed(1);
    const auto model = std::make_shared<TransformerBlock>(32, 4);
    model->to(device_under_test());
    const Tensor x = torch::randn({2, 8, 32}).to(device_under_test()).requires_grad_();
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    const auto block = [&](const Tensor& input) { return at::dropout(model->forward(input), 0.3, true); };
    torch::manual_seed(7);
    {
      const NoWaits no_waits;
      (checkpointed ? checkpoint_activations(block, x) : block(x)).sum().backward();
    }
    std::vector<Tensor> found = {peek(x.grad())};
    for (const auto& parameter : model->parameters()) found.push_back(peek(parameter.grad()));
    return found;
  };
  const auto kept = gradients(false), again = gradients(true);
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(bit_equal(again[i], kept[i])) << i;
}

TEST(DeviceGradScaler, StepsAndSkipsForEveryTypeOfGradient) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(type);
    const auto run = [&](at::Device device) {
      torch::manual_seed(1);
      std::vector<Tensor> params;
      for (const int64_t size : {40, 3, 0})
        params.push_back(torch::randn({size}).to(device, type).requires_grad_());
      // Without momentum: LibTorch's SGD rounds a momentum of 0.9 to BF16 on the way.
      torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.125));
      GradScaler scaler({.initial = 64, .growth_interval = 3});
      std::vector<std::string> told;
      for (int step = 0; step < 8; ++step) {
        for (std::size_t i = 0; i < params.size(); ++i) {
          torch::manual_seed(10 * step + static_cast<int64_t>(i));
          Tensor grad = torch::randn(params[i].sizes()) * scaler.state().loss_scale;
          if (step == 4 && i == 1) grad[2] = NAN;
          params[i].mutable_grad() = grad.to(device, type);
        }
        {
          std::optional<NoWaits> no_waits;
          if (!device.is_cpu()) no_waits.emplace();
          scaler.unscale_(optimizer);
          (void)clip_grad_norm_(params, 1.0);
        }
        told.push_back(scaler.step(optimizer).sentence());
        scaler.update();
      }
      std::vector<Tensor> weights;
      for (const Tensor& param : params) weights.push_back(peek(param).to(at::kDouble));
      return std::pair(told, weights);
    };
    const auto [here, here_weights] = run(at::kCPU);
    const auto [there, there_weights] = run(device_under_test());
    EXPECT_EQ(there, here);
    // Norms are summed in FP64 here and in FP32 there; a weight of 8 bits may round the other way in a step.
    const double unit = type == at::kBFloat16 ? 0x1p-7 : type == at::kHalf ? 0x1p-10 : 1e-5;
    for (std::size_t i = 0; i < here_weights.size(); ++i)
      EXPECT_TRUE(((there_weights[i] - here_weights[i]).abs() <= 8 * unit * (here_weights[i].abs() + 0.125))
                      .all()
                      .item<bool>());
  }
}

TEST(DeviceClip, TakesEveryTypeAndTwoDevices) {
  const auto clipped = [](const std::vector<Tensor>& grads) {
    std::vector<Tensor> params;
    for (const Tensor& grad : grads) {
      params.push_back(torch::zeros_like(grad).requires_grad_());
      params.back().mutable_grad() = grad.clone();
    }
    const double norm = peek(clip_grad_norm_(params, 1.0)).item<double>();
    double left = 0;
    for (const Tensor& param : params)
      left += peek(param.grad()).to(at::kDouble).square().sum().item<double>();
    return std::pair(norm, std::sqrt(left));
  };
  const at::Device there = device_under_test();
  for (const auto& grads : {std::vector{torch::full({4}, 10.0).to(there), torch::full({4}, 10.0)},
                            std::vector{torch::full({4}, 10.0), torch::full({4}, 10.0).to(there)},
                            std::vector{torch::full({4}, 10.0, at::kDouble).to(there)},
                            std::vector{torch::full({4}, 1e20).to(there)}}) {
    double sum = 0;
    for (const Tensor& grad : grads) sum += peek(grad).to(at::kDouble).square().sum().item<double>();
    const auto [norm, left] = clipped(grads);
    EXPECT_NEAR(norm, std::sqrt(sum), 1e-6 * std::sqrt(sum));
    EXPECT_NEAR(left, 1.0, 1e-5);
  }
}

TEST(DeviceClip, LaunchesDoNotGrowWithTheNumberOfGradients) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  const auto launches = [](int count) {
    std::vector<Tensor> params;
    for (int i = 0; i < count; ++i) {
      params.push_back(torch::randn({7}).to(device_under_test()).requires_grad_());
      params.back().mutable_grad() = torch::ones({7}).to(device_under_test());
    }
    reset_device_counts();
    const Tensor norm = clip_grad_norm_(params, 1.0);
    EXPECT_EQ(device_counts().waits, 0);
    const int64_t found = device_counts().launches;
    EXPECT_NEAR(peek(norm).item<double>(), std::sqrt(7.0 * count), 1e-5);
    EXPECT_NEAR(peek(params[0].grad())[0].item<double>(), 1 / std::sqrt(7.0 * count), 1e-6);
    return found;
  };
  EXPECT_EQ(launches(100), launches(10));
}

}  // namespace
}  // namespace halfstep::testing
