// A Probe on an accelerator: steps that it does not look at wait for nothing, and those that it does wait
// once for each tensor that it counts.
#include <gtest/gtest.h>
#include <halfstep/probe.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/counting_device.h"
#include "support/small_models.h"

namespace halfstep::testing {
namespace {

TEST(DeviceProbe, OnlyStepsThatAreLookedAtWaitOnceForEachTensor) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  // Outputs of three layers, and what the loss's softmax is given.
  constexpr int64_t kActivations = 4, kParams = 6, kEvery = 4;
  for (const Precision& precision : {Precision::fp32(), Precision::bf16(), Precision::fp16()})
    for (const int micro_batches : {1, 3})
      for (const bool activations : {true, false}) {
        torch::manual_seed(1);
        Mlp model(20, 24, 10);
        model.to(device_under_test());
        const at::Tensor x = torch::randn({32, 20}).to(device_under_test());
        const at::Tensor target = torch::randint(10, {32}).to(device_under_test());
        TrainStep step(precision, model, AdamWOptions{.lr = 1e-2},
                       {.micro_batches = micro_batches, .precision = {.autocast = kAnyMachine}});
        Probe probe(step.mixed_precision(), {.every = kEvery, .activations = activations});
        for (int64_t number = 1; number <= 2 * kEvery; ++number) {
          reset_device_counts();
          (void)step([&] { return model.loss(x, target); });
          const int64_t waits = device_counts().waits;
          const auto records = probe.take();
          EXPECT_EQ(device_counts().waits, waits);  // what was seen is here already
          if (probe.looks_at(number)) {
            EXPECT_EQ(waits, 3 * kParams + (activations ? kActivations * micro_batches : 0))
                << precision.name() << ", step " << number;
            EXPECT_EQ(std::ssize(records), 3 * kParams + (activations ? kActivations : 0));
          } else {
            EXPECT_EQ(waits, 0) << precision.name() << ", step " << number;
            EXPECT_TRUE(records.empty());
          }
          EXPECT_EQ(probe.looks_at(number), number == 1 || number % kEvery == 0);
        }
      }
}

}  // namespace
}  // namespace halfstep::testing
