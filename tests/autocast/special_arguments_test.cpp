// Arguments that a plain cast would spoil.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <halfstep/error.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/error_of.h"
#include "support/run_case.h"

namespace halfstep::testing {
namespace {

TEST(SpecialArguments, DtypeThatTheCallerPassedIsObeyed) {
  const at::Tensor x = at::rand({3, 4}).to(at::kBFloat16);
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(at::softmax(x, -1, at::kBFloat16).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::sum(x, at::kDouble).scalar_type(), at::kDouble);
  EXPECT_EQ(at::cumsum(x, 0, at::kHalf).scalar_type(), at::kHalf);
  EXPECT_EQ(at::linalg_vector_norm(x, 2, std::nullopt, false, at::kDouble).scalar_type(), at::kDouble);
}

TEST(SpecialArguments, IntegersStayIntegers) {
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(at::sum(at::arange(5)).scalar_type(), at::kLong);
  EXPECT_EQ(at::cumsum(at::arange(5), 0).scalar_type(), at::kLong);
  EXPECT_EQ(at::mm(at::ones({2, 2}, at::kLong), at::ones({2, 2}, at::kLong)).scalar_type(), at::kLong);
}

// 257 ones: BF16 holds 256 and 258 but not 257.
TEST(SpecialArguments, SumOfLowTensorIsNotRoundedToLow) {
  const at::Tensor ones = at::ones(257, at::kBFloat16);
  EXPECT_NE(at::sum(ones).to(at::kDouble).item<double>(), 257.0);
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(at::sum(ones).item<double>(), 257.0);
}

TEST(SpecialArguments, Fp64IsNeverNarrowed) {
  const at::Tensor x = at::rand({4, 4}, at::kDouble);
  const at::Tensor product = at::mm(x, x), log_probabilities = at::log_softmax(x, -1);
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_TRUE(at::equal(at::mm(x, x), product));
  EXPECT_TRUE(at::equal(at::matmul(x, x), product));
  EXPECT_TRUE(at::equal(at::log_softmax(x, -1), log_probabilities));
  EXPECT_EQ(at::mse_loss(x, x.to(at::kBFloat16)).scalar_type(), at::kDouble);
  EXPECT_EQ(at::index_copy(x, 0, at::arange(1), at::rand({1, 4})).scalar_type(), at::kDouble);
}

TEST(SpecialArguments, MixtureOfFp64AndFp32FailsAsItDoesOutsideAScope) {
  const at::Tensor x64 = at::rand({4, 4}, at::kDouble), x32 = at::rand({4, 4});
  const auto message = [&] {
    try {
      at::mm(x64, x32);
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("no error");
  };
  const std::string outside = message();
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(message(), outside);
  EXPECT_NE(outside, "no error");
}

// Stock autocast promotes only between FP32 and its own low type, and throws on the other one.
TEST(SpecialArguments, PromoteTakesBothLowTypesToFp32WhereTheEngineThrows) {
  const at::Tensor bf16 = at::ones({2}, at::kBFloat16), fp16 = at::ones({2}, at::kHalf);
  {
    const BareAutocast stock(at::kBFloat16);
    EXPECT_THROW(at::cat({bf16, fp16}), c10::Error);
  }
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(at::cat({bf16, fp16}).scalar_type(), at::kFloat);
  EXPECT_EQ(at::cat({fp16, fp16}).scalar_type(), at::kHalf);
}

TEST(SpecialArguments, Fp8IsRefusedByNameWhereStockDropsItsScale) {
  const at::Tensor fp8 = at::ones({16, 16}).to(at::kFloat8_e4m3fn), x = at::ones({16, 16});
  {
    const BareAutocast stock(at::kBFloat16);
    EXPECT_EQ(at::mm(fp8, fp8).scalar_type(), at::kBFloat16);
  }
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  const std::string low_row = error_of([&] { at::linear(x, fp8); });
  EXPECT_NE(low_row.find("aten::linear"), std::string::npos) << low_row;
  EXPECT_NE(low_row.find("'weight' is Float8_e4m3fn"), std::string::npos) << low_row;
  EXPECT_NE(error_of([&] { at::layer_norm(x, {16}, fp8[0]); }).find("aten::layer_norm"), std::string::npos);
  EXPECT_NE(error_of([&] { at::sum(fp8); }).find("aten::sum"), std::string::npos);
  EXPECT_NE(error_of([&] { at::cat({x, fp8}); }).find("'tensors' is Float8_e4m3fn"), std::string::npos);
}

TEST(SpecialArguments, Fp8TensorsAloneCanBeJoinedWhereStockThrows) {
  const at::Tensor fp8 = at::ones({4}).to(at::kFloat8_e4m3fn);
  {
    const BareAutocast stock(at::kBFloat16);
    EXPECT_THROW(at::cat({fp8, fp8}), c10::Error);
  }
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(at::cat({fp8, fp8}).scalar_type(), at::kFloat8_e4m3fn);
}

TEST(SpecialArguments, BinaryCrossEntropyOfLowProbabilitiesIsRefusedWithWhatToUse) {
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    const AutocastScope scope(low, OpPolicy::standard(), kAnyMachine);
    const at::Tensor logits = at::linear(at::full({1, 1}, 8.0), at::ones({1, 1})), target = at::zeros({1, 1});
    const std::string error = error_of([&] { at::binary_cross_entropy(at::sigmoid(logits), target); });
    EXPECT_NE(error.find(low == at::kHalf ? "0.9998 is 1 in Half" : "0.998 is 1 in BFloat16"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("binary_cross_entropy_with_logits"), std::string::npos) << error;
    EXPECT_NE(error.find("set(\"sigmoid\", OpRule::Fp32) of the OpPolicy"), std::string::npos) << error;
    EXPECT_NO_THROW(at::binary_cross_entropy(at::sigmoid(logits.to(at::kFloat)), target));
  }
  const AutocastScope stock(at::kBFloat16, OpPolicy::stock(), kAnyMachine);
  EXPECT_NO_THROW(at::binary_cross_entropy(at::ones({1}, at::kBFloat16), at::zeros({1})));
}

// A logit of 10 for a target of 0 has a loss of 10 and a gradient of 1. Oracle: FP64, from the logits.
TEST(SpecialArguments, BinaryCrossEntropyAfterAnFp32SigmoidLearnsFromWhatIsMostWrong) {
  auto policy = OpPolicy::standard();
  policy.set("sigmoid", OpRule::Fp32);
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    for (const double logit : {-10.0, 0.5, 4.0, 6.0, 6.5, 7.0, 8.0, 10.0}) {
      const at::Tensor z = at::full({1, 1}, logit).requires_grad_(), target = at::zeros({1, 1});
      at::Tensor loss;
      {
        const AutocastScope scope(low, policy, kAnyMachine);
        loss = at::binary_cross_entropy(at::sigmoid(at::linear(z, at::ones({1, 1}))), target);
      }
      loss.backward();
      const double p = 1 / (1 + std::exp(-logit));
      // The FP32 probability is off by 2^-24 at most, so the logarithm of what is left to 1 by that over it.
      const double bound = 0x1p-24 / (1 - p) + 0x1p-22;
      EXPECT_NEAR(loss.item<double>(), -std::log1p(-p), 2 * bound) << low << " " << logit;
      // The gradient is rounded to the logits' type, by 2^-8 of it at most.
      EXPECT_NEAR(z.grad().item<double>(), p, (0x1p-8 + bound) * p) << low << " " << logit;
    }
  }
}

// batch_norm writes its running statistics although its schema does not say so: a cast copy would swallow the
// news.
TEST(SpecialArguments, RunningStatisticsOfLowTypeAreUpdated) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    at::manual_seed(3);
    const at::Tensor x = at::rand({64, 4}).to(type) + 1;
    at::Tensor mean = at::zeros(4, type), var = at::ones(4, type);
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    at::batch_norm(x, {}, {}, mean, var, /*training=*/true, /*momentum=*/0.5, 1e-5, false);
    // Oracle: FP64. One rounding of the result to `type`, at most 2^-8 of it.
    const at::Tensor x64 = x.to(at::kDouble);
    EXPECT_TRUE(at::allclose(mean.to(at::kDouble), 0.5 * x64.mean(0), 0x1p-8, 0)) << type;
    EXPECT_TRUE(at::allclose(var.to(at::kDouble), 0.5 + 0.5 * x64.var(0), 0x1p-8, 0)) << type;
    EXPECT_EQ(mean.scalar_type(), type);

    const auto version = mean._version();
    at::batch_norm(x, {}, {}, mean, var, /*training=*/false, /*momentum=*/0.5, 1e-5, false);
    EXPECT_EQ(mean._version(), version) << "evaluation must not write: threads may share the model";
  }
}

}  // namespace
}  // namespace halfstep::testing
