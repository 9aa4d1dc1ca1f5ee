// TrainStep is the loop of its pieces, bit for bit.
#include <gtest/gtest.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <bit>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/error_of.h"
#include "support/small_models.h"

namespace halfstep {
namespace train_step_test {

using testing::bit_equal;
using testing::error_of;
using testing::kAnyMachine;
using testing::Mlp;

constexpr int kSteps = 12;

std::shared_ptr<Mlp> fresh_model() {
  torch::manual_seed(1);
  return std::make_shared<Mlp>(20, 24, 10);
}

at::Tensor batch_loss(Mlp& model, int number) {
  torch::manual_seed(100 + number);
  const at::Tensor x = torch::randn({32, 20});
  return model.loss(x, torch::randint(10, {32}));
}

/// The first steps of FP16 are skipped.
std::vector<Precision> precisions() {
  Precision fp16 = Precision::fp16();
  fp16.loss_scaling->initial = 0x1p24;
  return {Precision::fp32(), Precision::bf16(), fp16};
}

template <typename Model>
::testing::AssertionResult same_weights(const Model& a, const Model& b) {
  for (std::size_t i = 0; i < a.params().size(); ++i)
    if (!bit_equal(full_precision(a.params()[i]), full_precision(b.params()[i])))
      return ::testing::AssertionFailure() << a.params()[i].name << " differs";
  return ::testing::AssertionSuccess();
}

TEST(TrainStep, IsTheLoopOfItsPieces) {
  for (const Precision& precision : precisions())
    for (const int64_t micro_batches : {1, 3})
      for (const double max_norm : {0.05, double(INFINITY)}) {
        const auto whole = fresh_model(), pieces = fresh_model();
        TrainStep step(precision, *whole, AdamWOptions{.lr = 1e-2},
                       {.max_grad_norm = max_norm,
                        .micro_batches = micro_batches,
                        .precision = {.autocast = kAnyMachine}});
        MixedPrecision mp(precision, *pieces,
                          {.autocast = kAnyMachine,
                           .accumulation = micro_batches > 1 ? Accumulation::Fp32 : Accumulation::None});
        AdamW optimizer(mp.params(), {.lr = 1e-2});
        int skipped = 0;
        for (int i = 0; i < kSteps; ++i) {
          int batch = i * 10;
          const auto report = step([&] { return batch_loss(*whole, batch++); });
          EXPECT_EQ(batch, i * 10 + micro_batches);
          double mean_loss = 0;
          for (int m = 0; m < micro_batches; ++m) {
            const at::Tensor loss = mp.forward([&] { return batch_loss(*pieces, i * 10 + m); });
            mp.backward(micro_batches > 1 ? loss / micro_batches : loss);
            mean_loss += loss.item<double>() / static_cast<double>(micro_batches);
          }
          mp.close_sum();
          const auto grads = mp.inspect_grads();
          const auto expected =
              optimizer.step(std::isfinite(max_norm) ? grads.clipped_to(max_norm) : grads.unclipped());
          mp.advance(grads);
          optimizer.zero_grad();
          EXPECT_EQ(report.sentence(), expected.sentence());
          EXPECT_EQ(std::bit_cast<uint64_t>(report.grad_norm()),
                    std::bit_cast<uint64_t>(expected.grad_norm()));
          EXPECT_NEAR(step.loss().item<double>(), mean_loss, 1e-6 * mean_loss);
          EXPECT_EQ(step.mixed_precision().loss_scale(), mp.loss_scale());
          skipped += !report.stepped();
          ASSERT_TRUE(same_weights(step.mixed_precision(), mp)) << precision.name() << " step " << i;
        }
        EXPECT_EQ(skipped > 0, precision.loss_scaling.has_value());
      }
}

TEST(TrainStep, AFunctionThatThrowsMakesNoStep) {
  for (const int64_t micro_batches : {1, 3}) {
    const auto disturbed = fresh_model(), calm = fresh_model();
    const TrainStepOptions options{.micro_batches = micro_batches, .precision = {.autocast = kAnyMachine}};
    TrainStep step(Precision::bf16(), *disturbed, SgdOptions{.lr = 0.1}, options);
    TrainStep calm_step(Precision::bf16(), *calm, SgdOptions{.lr = 0.1}, options);
    for (int i = 0; i < 4; ++i) {
      int calls = 0;
      EXPECT_THROW((void)step([&] {
                     if (++calls == micro_batches) throw std::runtime_error("no more data");
                     return batch_loss(*disturbed, 50 + calls);
                   }),
                   std::runtime_error);
      int batch = i * 10, calm_batch = i * 10;
      ASSERT_TRUE(step([&] { return batch_loss(*disturbed, batch++); }).stepped());
      ASSERT_TRUE(calm_step([&] { return batch_loss(*calm, calm_batch++); }).stepped());
      ASSERT_TRUE(same_weights(step.mixed_precision(), calm_step.mixed_precision()));
    }
  }
}

TEST(TrainStep, AStepThatIsRefusedCanBeFollowedByAnother) {
  const auto disturbed = fresh_model(), calm = fresh_model();
  const TrainStepOptions options{.precision = {.autocast = kAnyMachine}};
  TrainStep step(Precision::bf16(), *disturbed, SgdOptions{.lr = 0.1}, options);
  TrainStep calm_step(Precision::bf16(), *calm, SgdOptions{.lr = 0.1}, options);
  EXPECT_NE(error_of([&] {
              (void)step([&] {
                const at::Tensor loss = batch_loss(*disturbed, 1);
                disturbed->parameters()[0].mutable_grad() = torch::ones({1});  // of another shape
                return loss;
              });
            }),
            "no error");
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(step([&] { return batch_loss(*disturbed, i); }).stepped());
    ASSERT_TRUE(calm_step([&] { return batch_loss(*calm, i); }).stepped());
  }
  EXPECT_TRUE(same_weights(step.mixed_precision(), calm_step.mixed_precision()));
}

TEST(TrainStep, GradientsOfParametersThatNoOptimizerHasAreDropped) {
  const auto model = fresh_model();
  MixedPrecision mp(Precision::fp32(), *model);
  std::vector<Param> some(mp.params().begin(), mp.params().begin() + 1);
  SGD optimizer(some, {.lr = 0});
  TrainStep step(std::move(mp), std::move(optimizer));
  const auto norm = [&] { return step([&] { return batch_loss(*model, 1); }).grad_norm(); };
  const double first = norm();
  EXPECT_EQ(norm(), first) << "of the same batch, with the same weights";
  EXPECT_EQ(norm(), first);
}

TEST(TrainStep, StallsThatWereAskedForAreNoneInASkippedStep) {
  const auto model = fresh_model();
  Precision fp16 = Precision::fp16();
  fp16.loss_scaling->initial = 0x1p60;
  TrainStep step(fp16, *model, AdamWOptions{}, {.precision = {.autocast = kAnyMachine}});
  const auto report = step([&] { return batch_loss(*model, 1); }, {.stalls = true});
  ASSERT_FALSE(report.stepped());
  EXPECT_TRUE(report.stalls().empty());
  EXPECT_EQ(report.stall().updates, 0);
}

TEST(TrainStep, TakesPiecesThatWereBuiltBefore) {
  const auto model = fresh_model(), other = fresh_model();
  MixedPrecision mp(Precision::bf16(), *model, {.autocast = kAnyMachine});
  std::vector<ParamGroup<AdamWOptions>> groups{{{}, {.lr = 1e-2}}, {{}, {.lr = 1e-3, .weight_decay = 0}}};
  for (const Param& param : mp.params()) groups[param.working.dim() < 2].params.push_back(param);
  AdamW optimizer(groups);
  TrainStep step(std::move(mp), std::move(optimizer), {.max_grad_norm = 1});
  TrainStep one_group(Precision::bf16(), *other, AdamWOptions{.lr = 1e-2},
                      {.max_grad_norm = 1, .precision = {.autocast = kAnyMachine}});
  ASSERT_TRUE(step([&] { return batch_loss(*model, 0); }, {.stalls = true}).stepped());
  ASSERT_TRUE(one_group([&] { return batch_loss(*other, 0); }).stepped());
  EXPECT_EQ(step.optimizer().options(1).lr, 1e-3);
  EXPECT_FALSE(same_weights(step.mixed_precision(), one_group.mixed_precision()));
  const at::Tensor evaluated = step.forward([&] { return batch_loss(*model, 7); });
  EXPECT_TRUE(evaluated.isfinite().item<bool>());
}

TEST(TrainStep, RefusesOptionsThatMakeNoSense) {
  const auto model = fresh_model();
  const auto with = [&](TrainStepOptions options) {
    return error_of([&] { TrainStep(Precision::fp32(), *model, SgdOptions{}, options); });
  };
  EXPECT_NE(with({.max_grad_norm = 0}).find("max_grad_norm is 0"), std::string::npos);
  EXPECT_NE(with({.micro_batches = 0}).find("micro_batches is 0"), std::string::npos);
}

}  // namespace train_step_test
}  // namespace halfstep
