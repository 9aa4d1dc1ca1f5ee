// Autocast on a device that is neither the CPU nor CUDA: every row of the policy.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/counting_device.h"
#include "support/run_case.h"

namespace halfstep::testing {
namespace {

constexpr at::ScalarType kLowTypes[] = {at::kBFloat16, at::kHalf};

/// What the device cannot run: an operation of the CPU alone, and cells that LibTorch gives to a kernel of
/// CUDA's on any accelerator.
bool is_beyond_the_device(const std::string& error) {
  return error.find("CUDA has no kernel for aten::mkldnn_rnn_layer") != error.npos ||
         error.find("Could not run 'aten::_thnn_fused_") != error.npos;
}

TEST(DeviceAutocast, EveryRowGivesTheTypesThatItGivesOnTheCpu) {
  int compared = 0;
  for (const at::ScalarType low : kLowTypes)
    for (const OpCase& op_case : op_cases()) {
      // A function of the CPU on any device: it reads its arguments on the host, and dies of it.
      if (op_case.op == "_grid_sampler_2d_cpu_fallback") continue;
      for (const std::vector<at::ScalarType>& given :
           {std::vector{at::kFloat}, std::vector{low}, std::vector{low, at::kFloat}}) {
        SCOPED_TRACE(::testing::Message() << op_case.op << " of " << ::testing::PrintToString(given));
        const auto run = [&](at::Device device) {
          return run_case(
              op_case, given,
              [&] {
                return std::make_unique<AutocastScope>(low, OpPolicy::standard(), low_on_any_machine(low));
              },
              device);
        };
        const Outcome here = run(at::kCPU), there = run(kCountingDevice);
        if (is_beyond_the_device(there.error)) continue;
        EXPECT_EQ(there.error.empty(), here.error.empty()) << there.error << here.error;
        if (!here.error.empty() || !there.error.empty()) continue;
        // The CPU lacks some kernels for FP16 and for LSTM layers; the device is given the low type there.
        // Layer norm of low rows with a low gain has a test of its own.
        const bool is_low_norm = op_case.op == "layer_norm" && given == std::vector{low};
        if (op_case.has_fp16_kernel && !is_low_norm) {
          EXPECT_EQ(there.output.scalar_type(), here.output.scalar_type());
        }
        ASSERT_EQ(there.leaves.size(), here.leaves.size());
        for (size_t i = 0; i < here.leaves.size(); ++i)
          EXPECT_EQ(there.leaves[i].grad().defined(), here.leaves[i].grad().defined());
        ++compared;
      }
    }
  EXPECT_GT(compared, 800);
}

/// What the CPU gives in FP32, rounded once: a rounding of FP32's more, for sums in another order, may carry
/// it to the neighbour. Of arguments of two types the output is FP32, as on the CPU.
TEST(DeviceAutocast, LayerNormOfLowRowsIsFp32sRoundedOnce) {
  at::manual_seed(2);
  for (const at::ScalarType low : kLowTypes) {
    const at::Tensor rows = at::randn({64, 96}).to(low), gain = at::randn({96}).to(low),
                     bias = at::randn({96}).to(low);
    const auto on = [&](at::Device device, at::ScalarType gain_type) {
      const AutocastScope scope(low, OpPolicy::standard(), kAnyMachine);
      return at::layer_norm(rows.to(device), {96}, gain.to(device, gain_type), bias.to(device, gain_type));
    };
    const at::Tensor here = on(at::kCPU, low), there = peek(on(kCountingDevice, low));
    EXPECT_EQ(here.scalar_type(), at::kFloat);
    EXPECT_EQ(there.scalar_type(), low);
    const double half_unit = low == at::kHalf ? 0x1p-11 : 0x1p-8;
    const at::Tensor bound = here.abs() * (half_unit * (1 + 0x1p-8)) + 0x1p-20;
    EXPECT_TRUE(((there.to(at::kFloat) - here).abs() <= bound).all().item<bool>());
    EXPECT_EQ(on(kCountingDevice, at::kFloat).scalar_type(), at::kFloat);
  }
}

TEST(DeviceAutocast, AScopeLeavesTheStateOfTheDeviceAsItWas) {
  at::autocast::set_autocast_dtype(at::kPrivateUse1, at::kBFloat16);
  {
    const AutocastScope outer(at::kHalf, OpPolicy::standard(), kAnyMachine);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kPrivateUse1));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kPrivateUse1), at::kHalf);
    {
      const auto off = AutocastScope::disabled();
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kPrivateUse1));
    }
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kPrivateUse1));
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kPrivateUse1));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kPrivateUse1), at::kBFloat16);
}

TEST(DeviceAutocast, ForwardAndBackwardDoNotWait) {
  const auto options = at::TensorOptions(kCountingDevice);
  const at::Tensor x = at::randn({4, 8}, options), w = at::randn({8, 8}, options).requires_grad_(),
                   gain = at::ones({8}, options).requires_grad_(),
                   targets = at::arange(4, options.dtype(at::kLong));
  const NoWaits no_waits;
  at::Tensor loss;
  {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    const at::Tensor hidden = at::gelu(at::linear(at::layer_norm(x, {8}, gain), w));
    loss = at::cross_entropy_loss(at::linear(at::rms_norm(hidden, {8}, gain), w), targets);
  }
  loss.backward();
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_EQ(w.grad().device(), kCountingDevice);
}

}  // namespace
}  // namespace halfstep::testing
