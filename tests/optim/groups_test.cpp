// Groups with options of their own, and schedules inside the optimizer.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::error_of;

Param fp32_param(const std::string& name, const torch::Tensor& values) {
  return make_param(name, values.clone().requires_grad_(), WeightStorage::Fp32, at::kFloat);
}

TEST(Groups, EachFollowsItsOwnOptionsAsIfAlone) {
  torch::manual_seed(1);
  const auto a = torch::randn({50}), b = torch::randn({60});
  const AdamWOptions fast{.lr = 1e-2, .weight_decay = 0.0};
  const AdamWOptions slow{
      .lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1, .moments = MomentStorage::Bf16};
  const Param together_a = fp32_param("a", a), together_b = fp32_param("b", b);
  const Param alone_a = fp32_param("a", a), alone_b = fp32_param("b", b);
  AdamW together({{{together_a}, fast}, {{together_b}, slow}});
  AdamW only_a({alone_a}, fast);
  // The same place among the parameters, so that the random numbers of BF16 moments are the same.
  AdamW only_b({{{fp32_param("first", a)}, fast}, {{alone_b}, slow}});
  for (int step = 0; step < 5; ++step) {
    for (const Param& param : {together_a, alone_a})
      param.working.mutable_grad() = torch::full({50}, 0.1 * step + 0.1);
    for (const Param& param : {together_b, alone_b})
      param.working.mutable_grad() = torch::full({60}, 0.2 * step - 0.3);
    for (AdamW* optimizer : {&together, &only_a, &only_b}) ASSERT_TRUE(optimizer->step({}).stepped());
  }
  EXPECT_TRUE(bit_equal(together_a.working, alone_a.working));
  EXPECT_TRUE(bit_equal(together_b.working, alone_b.working));
  EXPECT_FALSE(bit_equal(together_a.working, a));
}

TEST(Groups, ScheduleGoesByTheStepsThatWereTaken) {
  const auto initial = torch::zeros({3});
  const Param scheduled = fp32_param("w", initial), by_hand = fp32_param("w", initial);
  const auto schedule = Schedule::linear({.warmup_steps = 2, .total_steps = 8});
  SGD optimizer({scheduled}, {.lr = 0.5, .schedule = schedule});
  SGD plain({by_hand}, {.lr = 0.5});
  for (int step = 0; step < 8; ++step) {
    for (const Param& param : {scheduled, by_hand})
      param.working.mutable_grad() = torch::full({3}, 1.0 + step);
    // A skipped step moves no schedule.
    ASSERT_FALSE(optimizer.step(GradMultiplier(GradSummary({.finite = false}))).stepped());
    plain.set_options({.lr = 0.5 * schedule.factor(step)});
    ASSERT_TRUE(optimizer.step({}).stepped());
    ASSERT_TRUE(plain.step({}).stepped());
  }
  EXPECT_EQ(optimizer.steps(), 8);
  EXPECT_TRUE(bit_equal(scheduled.working, by_hand.working));
}

TEST(Groups, ParameterListedTwiceIsSteppedOnce) {
  const Param once = fp32_param("w", torch::ones({5})), twice = fp32_param("w", torch::ones({5}));
  for (const Param& param : {once, twice}) param.working.mutable_grad() = torch::ones({5});
  SGD single({once}, {.lr = 0.1}), doubled({twice, twice}, {.lr = 0.1});
  ASSERT_TRUE(single.step({}).stepped());
  ASSERT_TRUE(doubled.step({}).stepped());
  EXPECT_TRUE(bit_equal(once.working, twice.working));
}

TEST(Groups, ParametersThatCannotBeToldApartAreRefusedByName) {
  const Param w = fp32_param("w", torch::ones({5}));
  const auto message = [](auto&& make) { return error_of(make); };
  EXPECT_NE(
      message([&] { SGD({w, fp32_param("w", torch::ones({5}))}); }).find("two parameters are called 'w'"),
      std::string::npos);
  EXPECT_NE(message([&] { SGD({{{w}, {}}, {{w}, {}}}); }).find("is in group 0 and in group 1"),
            std::string::npos);
  EXPECT_NE(message([&] { SGD(std::vector<Param>{}); }).find("no parameter to train"), std::string::npos);
}

TEST(Groups, StorageOfMomentsCannotChangeInMidRun) {
  AdamW optimizer({fp32_param("w", torch::ones({5}))});
  EXPECT_NE(error_of([&] { optimizer.set_options({.moments = MomentStorage::Bf16}); }).find("cannot change"),
            std::string::npos);
  EXPECT_NE(error_of([&] { (void)optimizer.options(1); }).find("no group 1 among 1"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
