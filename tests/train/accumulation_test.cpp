// Micro-batches summed beside low-precision gradients.
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::error_of;

/// Its gradient is what the test says: loss = sum(w * wanted).
struct AccumulationModel : torch::nn::Module {
  explicit AccumulationModel(int64_t count) {
    w = register_parameter("w", torch::ones({count}));
    unused = register_parameter("unused", torch::ones({3}));
  }
  at::Tensor loss(const at::Tensor& wanted) { return (w * wanted.to(w.scalar_type())).sum(at::kFloat); }
  at::Tensor w, unused;
};

MixedPrecisionOptions with(Accumulation accumulation) {
  return {.autocast = testing::kAnyMachine, .accumulation = accumulation};
}

TEST(Accumulation, Fp32SumIsExactWhereBf16WouldLoseEverySmallTerm) {
  // 256 + 255 times 1: in BF16 256 + 1 = 256, so autograd's own sum stays 256.
  AccumulationModel model(5);
  MixedPrecision mp(Precision::bf16(), model, with(Accumulation::Fp32));
  mp.backward(model.loss(torch::full({5}, 256.0)));
  for (int i = 0; i < 255; ++i) mp.backward(model.loss(torch::ones({5})));
  mp.close_sum();
  const auto grads = mp.inspect_grads();
  EXPECT_TRUE(grads.finite());
  EXPECT_TRUE(bit_equal(model.w.grad(), torch::full({5}, 511.0f)));
  EXPECT_DOUBLE_EQ(grads.norm(), 511.0 * std::sqrt(5.0));
  EXPECT_FALSE(model.unused.grad().defined());
}

TEST(Accumulation, KahanInBf16StaysWithinARoundingOfTheSum) {
  torch::manual_seed(4);
  AccumulationModel model(1000);
  MixedPrecision mp(Precision::bf16(), model, with(Accumulation::Bf16Kahan));
  auto exact = torch::zeros({1000}, at::kDouble), magnitudes = torch::zeros({1000}, at::kDouble);
  constexpr int kMicroBatches = 64;
  for (int i = 0; i < kMicroBatches; ++i) {
    const auto wanted = torch::randn({1000}).to(at::kBFloat16);
    exact += wanted.to(at::kDouble);
    magnitudes += wanted.to(at::kDouble).abs();
    mp.backward(model.loss(wanted));
  }
  mp.close_sum();
  (void)mp.inspect_grads();
  EXPECT_EQ(model.w.grad().scalar_type(), at::kBFloat16);
  // Kahan: (2u + O(n u^2)) times the sum of magnitudes, with u = 2^-8 (Higham, Accuracy and Stability, 4.3).
  const auto bound = magnitudes * (0x1p-7 + kMicroBatches * 0x1p-15);
  EXPECT_TRUE(((model.w.grad().to(at::kDouble) - exact).abs() <= bound).all().item<bool>());
}

TEST(Accumulation, BadMicroBatchIsNamedAndDoesNotPoisonTheSum) {
  for (const auto accumulation : {Accumulation::Fp32, Accumulation::Bf16Kahan}) {
    AccumulationModel model(5);
    auto precision = Precision::fp16();
    precision.loss_scaling->initial = 0x1p10;  // this loss has gradients of about 1
    MixedPrecision mp(precision, model, with(accumulation));
    AdamW optimizer(mp.params());
    const auto before = mp.state_dict();
    const double scale = mp.loss_scale();
    auto bad = torch::ones({5});
    bad[3] = INFINITY;
    mp.backward(model.loss(torch::full({5}, 0x1p-10)));
    mp.backward(model.loss(torch::full({5}, 0x1p-10)));
    mp.backward(model.loss(bad));
    EXPECT_FALSE(model.w.grad().defined());
    mp.backward(model.loss(torch::full({5}, 0x1p-10)));
    mp.close_sum();
    const auto grads = mp.inspect_grads();
    EXPECT_FALSE(grads.finite());
    EXPECT_EQ(grads.micro_batch(), 2);
    EXPECT_EQ(grads.first_bad(), "w");
    EXPECT_DOUBLE_EQ(grads.norm(), 3 * 0x1p-10 * std::sqrt(5.0));  // of the three good ones
    const auto report = optimizer.step(grads.clipped_to(1.0));
    EXPECT_EQ(report.outcome(), StepOutcome::SkippedNonFinite);
    EXPECT_NE(report.sentence().find("in micro-batch 2"), std::string::npos) << report.sentence();
    mp.advance(grads);
    optimizer.zero_grad();
    EXPECT_EQ(mp.loss_scale(), scale / 2);
    EXPECT_TRUE(bit_equal(model.w, before.tensor("working.w")));

    // And the next step starts clean.
    mp.backward(model.loss(torch::full({5}, 0x1p-10)));
    mp.close_sum();
    const auto next = mp.inspect_grads();
    EXPECT_TRUE(next.finite());
    EXPECT_EQ(next.micro_batch(), -1);
    EXPECT_DOUBLE_EQ(next.norm(), 0x1p-10 * std::sqrt(5.0));
  }
}

TEST(Accumulation, StepOverMicroBatchesIsTheStepOverTheirSum) {
  torch::manual_seed(5);
  AccumulationModel summed(50), whole(50);
  MixedPrecision micro(Precision::bf16(), summed, with(Accumulation::Fp32));
  MixedPrecision once(Precision::bf16(), whole, with(Accumulation::None));
  AdamW micro_optimizer(micro.params()), once_optimizer(once.params());
  for (int step = 0; step < 5; ++step) {
    const auto wanted = torch::randint(-8, 8, {4, 50}).to(at::kFloat);  // sums that BF16 holds
    for (int i = 0; i < 4; ++i) micro.backward(summed.loss(wanted[i]));
    once.backward(whole.loss(wanted.sum(0)));
    for (auto [mp, optimizer] : {std::pair{&micro, &micro_optimizer}, std::pair{&once, &once_optimizer}}) {
      mp->close_sum();
      const auto grads = mp->inspect_grads();
      ASSERT_TRUE(optimizer->step(grads.clipped_to(1.0)).stepped());
      mp->advance(grads);
      optimizer->zero_grad();
    }
    EXPECT_TRUE(bit_equal(full_precision(micro.params()[0]), full_precision(once.params()[0])));
  }
}

TEST(Accumulation, BackwardIsRefusedUntilTheStepIsOver) {
  for (const auto& precision : {Precision::bf16(), Precision::fp32()}) {
    AccumulationModel model(5);
    MixedPrecision mp(precision, model, with(Accumulation::Fp32));
    AdamW optimizer(mp.params());
    const auto backward = [&] { mp.backward(model.loss(torch::ones({5}))); };
    backward();
    EXPECT_NE(error_of([&] { (void)mp.inspect_grads(); }).find("is still open"), std::string::npos);
    mp.close_sum();
    EXPECT_NE(error_of(backward).find("is closed"), std::string::npos);
    mp.close_sum();  // closed twice is closed
    const auto grads = mp.inspect_grads();
    EXPECT_NE(error_of(backward).find("advance was not called"), std::string::npos);
    EXPECT_TRUE(bit_equal(model.w.grad(), torch::ones({5})));  // the closed sum is as it was
    ASSERT_TRUE(optimizer.step(grads.unclipped()).stepped());
    mp.advance(grads);
    // In FP32 too: .grad is the sum itself, and autograd would add the next step to the last one.
    EXPECT_NE(error_of(backward).find("still has a gradient"), std::string::npos);
    optimizer.zero_grad();
    backward();
    mp.close_sum();
    EXPECT_DOUBLE_EQ(mp.inspect_grads().norm(), std::sqrt(5.0));
  }
}

TEST(Accumulation, AParameterMayBeLaidOutAnewBetweenStepsAndMicroBatches) {
  for (const bool between_micro_batches : {false, true}) {
    torch::manual_seed(5);
    torch::nn::Conv2d model(torch::nn::Conv2dOptions(3, 4, 3));
    MixedPrecision mp(Precision::fp32(), model, {.accumulation = Accumulation::Fp32});
    const auto train = [&](int number) {
      torch::manual_seed(number);
      const at::Tensor x = torch::randn({2, 3, 6, 6});
      mp.backward(mp.forward([&] { return model(x).pow(2).mean(); }));
    };
    train(1);
    const auto lay_out = [&] {
      model->weight.set_data(model->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    };
    if (!between_micro_batches) {
      mp.close_sum();
      const auto grads = mp.inspect_grads();
      mp.advance(grads);
      mp.zero_grad();
      lay_out();
      train(1);
    } else {
      lay_out();
    }
    train(2);
    mp.close_sum();
    (void)mp.inspect_grads();
    const at::Tensor found = model->weight.grad().clone();
    at::Tensor wanted;
    mp.zero_grad();
    for (const int number : {1, 2}) {
      torch::manual_seed(number);
      const at::Tensor x = torch::randn({2, 3, 6, 6});
      const auto grad = torch::autograd::grad({model(x).pow(2).mean()}, {model->weight})[0];
      wanted = wanted.defined() ? wanted + grad : grad;
    }
    EXPECT_LE((found - wanted).norm().item<double>(), 1e-6 * wanted.norm().item<double>());
  }
}

}  // namespace
}  // namespace halfstep
