// Training steps on an accelerator: the decisions and, within roundings, the numbers of the CPU's kernels,
// without one wait for the device.
#include <gtest/gtest.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/counting_device.h"
#include "support/error_of.h"
#include "support/scratch.h"
#include "support/small_models.h"
#include "tensor/update_path.h"

namespace halfstep::testing {
namespace {

using at::Tensor;

/// Parameters of the same values here and there.
struct Pair {
  explicit Pair(WeightStorage storage, at::ScalarType low,
                std::initializer_list<int64_t> sizes = {300, 7, 64}) {
    torch::manual_seed(3);
    int number = 0;
    for (const int64_t size : sizes) {
      const Tensor values = torch::randn({size});
      const std::string name = "p" + std::to_string(number++);
      here.push_back(make_param(name, values.clone().requires_grad_(), storage, low));
      there.push_back(make_param(name, values.to(device_under_test()).requires_grad_(), storage, low));
    }
  }
  void set_grad(std::size_t i, const Tensor& grad) const {
    here[i].working.mutable_grad() = grad.clone();
    there[i].working.mutable_grad() = grad.to(device_under_test());
  }
  std::vector<Param> here, there;
};

struct Case {
  WeightStorage storage;
  at::ScalarType low;
};
const Case kCases[] = {
    {WeightStorage::Fp32, at::kFloat},          {WeightStorage::Fp32Master, at::kBFloat16},
    {WeightStorage::Fp32Master, at::kHalf},     {WeightStorage::SplitMaster, at::kBFloat16},
    {WeightStorage::Kahan, at::kBFloat16},      {WeightStorage::Kahan, at::kHalf},
    {WeightStorage::Stochastic, at::kBFloat16}, {WeightStorage::Stochastic, at::kHalf},
    {WeightStorage::Nearest, at::kBFloat16},    {WeightStorage::Nearest, at::kHalf}};

/// What a weight may be off by in a step, relative to it, when two ways of rounding it differ.
double unit_of(const Case& c) {
  const double low = c.low == at::kHalf ? 0x1p-11 : 0x1p-8;  // half a unit in the last place
  switch (c.storage) {
    case WeightStorage::Kahan:
      return 4 * low * low;  // the compensation is rounded here and there
    case WeightStorage::Stochastic:
      return 4 * low;  // up here, down there: a whole unit, and that of a neighbour
    case WeightStorage::Nearest:
      return 2 * low;
    default:
      return 0x1p-23;
  }
}

/// The same gradients, scaled, clipped, some of them not finite. The gradient that an update sees is
/// multiplied by one rounded number here and divided by another there: 3 roundings of 2^-24. AdamW's update
/// is a quotient of sums of it and of its square, each with a few roundings more: 32 x 2^-24 of the step's
/// largest update, lr x 1.1 or for SGD what the gradient gives. Weights are rounded to FP32 once a step. A
/// working copy without a master may then round the other way.
template <typename Options>
void expect_steps_alike(const Case& c, const Options& options, double largest_update, int steps) {
  const Pair pair(c.storage, c.low);
  FusedOptimizer<Options> here(pair.here, options), there(pair.there, options);
  constexpr double kScale = 512;
  int skipped = 0;
  std::vector<Tensor> largest(pair.here.size(), torch::zeros({}));  // magnitude of each weight on its way
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < pair.here.size(); ++i) {
      torch::manual_seed(100 * step + static_cast<int64_t>(i));
      Tensor grad = (torch::randn(pair.here[i].working.sizes()) * kScale).to(c.low);
      if (step % 7 == 3 && i == 1) grad[5] = step % 2 ? INFINITY : NAN;
      pair.set_grad(i, grad);
    }
    const auto expected = here.step(inspect_grads(pair.here, kScale).clipped_to(1.0));
    const auto scale = std::optional<double>(kScale);
    const Tensor before = peek(pair.there[1].working);
    std::optional<StepReport> report;
    {
      const NoWaits no_waits;
      report.emplace(there.step(inspect_grads(pair.there, scale).clipped_to(1.0)));
    }
    EXPECT_EQ(report->sentence(), expected.sentence());
    if (expected.stepped()) {
      EXPECT_NEAR(report->grad_norm(), expected.grad_norm(), 1e-6 * expected.grad_norm());
    }
    skipped += !expected.stepped();
    for (std::size_t i = 0; i < pair.here.size(); ++i)
      largest[i] = at::maximum(largest[i], full_precision(pair.here[i]).abs());
    if (!expected.stepped()) {
      EXPECT_TRUE(bit_equal(peek(pair.there[1].working), before));
    }
  }
  EXPECT_GT(skipped, 0);
  EXPECT_EQ(there.steps(), here.steps());
  const double smallest = c.low == at::kHalf && unit_of(c) > 0x1p-23 ? 0x1p-24 : 0;  // a subnormal's step
  for (std::size_t i = 0; i < pair.here.size(); ++i) {
    const Tensor expected = full_precision(pair.here[i]), found = peek(full_precision(pair.there[i]));
    const Tensor bound = steps * (largest_update * 32 * 0x1p-24 + largest[i] * unit_of(c) + smallest);
    EXPECT_TRUE(((found - expected).abs() <= bound).all().item<bool>())
        << pair.here[i].name << ": " << ((found - expected).abs() / bound).max().item<double>()
        << " of its bound";
  }
}

TEST(DeviceStep, AdamWIsThatOfTheKernelsWithinRoundings) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << to_string(c.storage) << " " << c.low);
    expect_steps_alike(c, AdamWOptions{.lr = 1e-2, .weight_decay = 0.1}, 1.1e-2, 30);
    expect_steps_alike(
        c, AdamWOptions{.lr = 1e-2, .schedule = Schedule::cosine({.warmup_steps = 4, .total_steps = 20})},
        1.1e-2, 30);
  }
}

TEST(DeviceStep, SgdIsThatOfTheKernelsWithinRoundings) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << to_string(c.storage) << " " << c.low);
    expect_steps_alike(c, SgdOptions{.lr = 0.1}, 0.1, 20);
    expect_steps_alike(c, SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 1e-2, .nesterov = true}, 1.0,
                       20);
  }
}

TEST(DeviceStep, DecidesAsTheCpuWhereverAnInfOrANaNIs) {
  const Pair pair(WeightStorage::Fp32Master, at::kHalf, {33, 5, 120, 1});
  torch::manual_seed(9);
  for (int i = 0; i < 10000; ++i) {
    const int64_t bad_count = torch::randint(3, {1}).item<int64_t>();
    for (std::size_t p = 0; p < pair.here.size(); ++p)
      pair.set_grad(p, torch::ones(pair.here[p].working.sizes(), at::kHalf));
    for (int64_t bad = 0; bad < bad_count; ++bad) {
      const auto p = static_cast<std::size_t>(torch::randint(4, {1}).item<int64_t>());
      Tensor grad = pair.here[p].working.grad();
      grad[torch::randint(grad.numel(), {1}).item<int64_t>()] = i % 3 == 0   ? NAN
                                                                : i % 3 == 1 ? INFINITY
                                                                             : -INFINITY;
      pair.set_grad(p, grad);
    }
    const GradSummary here = inspect_grads(pair.here, 64.0), there = inspect_grads(pair.there, 64.0);
    ASSERT_EQ(there.finite(), here.finite()) << i;
    ASSERT_EQ(there.first_bad(), here.first_bad()) << i;
  }
}

Tensor loss_of(Mlp& model, int step, at::Device device, bool overflow) {
  torch::manual_seed(100 + step);
  Tensor x = torch::randn({32, 20});
  if (overflow) x[0][0] = INFINITY;
  const Tensor targets = torch::randint(10, {32});
  return model.loss(x.to(device, at::kFloat, /*non_blocking=*/true), targets.to(device, at::kLong, true));
}

/// All of a step: forward, backward, inspection, clipping, update, loss scale, and steps that are skipped.
TEST(DeviceStep, AWholeStepDoesNotWait) {
  for (const int64_t micro_batches : {1, 3})
    for (const char* which : {"fp32", "bf16", "fp16"}) {
      SCOPED_TRACE(::testing::Message() << which << " " << micro_batches);
      Precision precision = which[0] == 'b' ? Precision::bf16() : Precision::fp32();
      if (std::string(which) == "fp16") {
        precision = Precision::fp16();
        precision.loss_scaling->initial = 0x1p20;
        precision.loss_scaling->growth_interval = 5;
      }
      const auto run = [&](at::Device device) {
        torch::manual_seed(1);
        const auto model = std::make_shared<Mlp>(20, 24, 10);
        model->to(device);
        TrainStep step(
            precision, *model, AdamWOptions{.lr = 1e-2},
            {.max_grad_norm = 1, .micro_batches = micro_batches, .precision = {.autocast = kAnyMachine}});
        std::vector<StepReport> reports;
        {
          const NoWaits no_waits;
          for (int i = 0; i < 20; ++i)
            reports.push_back(step([&] { return loss_of(*model, i, device, i == 7 || i == 8); }));
        }
        std::vector<std::string> told;
        for (const StepReport& report : reports) told.push_back(report.sentence());
        std::vector<Tensor> weights;
        for (const Param& param : step.mixed_precision().params())
          weights.push_back(peek(full_precision(param)));
        return std::tuple(told, step.mixed_precision().loss_scale_state(), weights);
      };
      const auto [here, here_scale, here_weights] = run(at::kCPU);
      const auto [there, there_scale, there_weights] = run(device_under_test());
      EXPECT_EQ(there, here);
      EXPECT_EQ(there_scale, here_scale);
      EXPECT_GE(there_scale.total_skips, 2);
      // Forward and backward differ by LibTorch's kernels; what is told alike above was decided alike.
      for (std::size_t i = 0; i < here_weights.size(); ++i)
        EXPECT_LE((there_weights[i] - here_weights[i]).norm().item<double>(),
                  0.05 * (here_weights[i].norm().item<double>() + 0.1));
    }
}

TEST(DeviceStep, AnEditOfAWeightWins) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << to_string(c.storage) << " " << c.low);
    const Pair pair(c.storage, c.low);
    AdamW here(pair.here), there(pair.there);
    for (int step = 0; step < 4; ++step) {
      for (std::size_t i = 0; i < pair.here.size(); ++i)
        pair.set_grad(i, torch::full(pair.here[i].working.sizes(), 0.01 * (step + 1)).to(c.low));
      const at::NoGradGuard no_grad;
      if (step == 2)
        for (const auto& params : {pair.here, pair.there}) {
          params[0].working.zero_();
          params[1].working.mul_(2);
          params[2].working.clamp_(-0.5, 0.5);
        }
      (void)here.step(inspect_grads(pair.here).unclipped());
      (void)there.step(inspect_grads(pair.there).unclipped());
    }
    for (std::size_t i = 0; i < pair.here.size(); ++i)
      EXPECT_LE(
          (peek(full_precision(pair.there[i])) - full_precision(pair.here[i])).abs().max().item<double>(),
          4 * std::max(1e-6, 2 * unit_of(c)));
  }
}

TEST(DeviceStep, StatesGoFromOneDeviceToTheOther) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << to_string(c.storage) << " " << c.low);
    const Pair pair(c.storage, c.low);
    AdamW here(pair.here), there(pair.there);
    for (int step = 0; step < 3; ++step) {
      for (std::size_t i = 0; i < pair.here.size(); ++i)
        pair.set_grad(i, torch::randn(pair.here[i].working.sizes()).to(c.low));
      (void)there.step(inspect_grads(pair.there).unclipped());
    }
    const StateDict saved = there.state_dict();
    here.load_state_dict(saved);
    EXPECT_EQ(here.steps(), 3);
    AdamW back(pair.there);
    back.load_state_dict(here.state_dict());
    const StateDict again = back.state_dict();
    for (const auto& [name, value] : saved)
      if (const auto* tensor = std::get_if<Tensor>(&value)) {
        EXPECT_TRUE(bit_equal(peek(again.tensor(name)), peek(*tensor))) << name;
      }
  }
}

/// Every storage, optimizer and kind of moments has on the accelerator the bits of the same operations on the
/// CPU, with steps that are skipped among them.
TEST(DeviceStep, HasTheBitsOfTheSameOperationsOnTheCpu) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  const AtenOnCpu twin;
  const auto run = [](const Case& c, const auto& options) {
    using Options = std::decay_t<decltype(options)>;
    const Pair pair(c.storage, c.low);
    FusedOptimizer<Options> here(pair.here, options, /*seed=*/5), there(pair.there, options, 5);
    for (int step = 0; step < 20; ++step) {
      for (std::size_t i = 0; i < pair.here.size(); ++i) {
        torch::manual_seed(100 * step + static_cast<int64_t>(i));
        Tensor grad = (torch::randn(pair.here[i].working.sizes()) * 64).to(c.low);
        if (step % 5 == 3) grad[0] = NAN;
        pair.set_grad(i, grad);
        if (step == 7 && i == 2)
          pair.here[i].working.mutable_grad().reset(), pair.there[i].working.mutable_grad().reset();
      }
      (void)here.step(inspect_grads(pair.here, 64.0).clipped_to(1.0));
      const NoWaits no_waits;
      (void)there.step(inspect_grads(pair.there, 64.0).clipped_to(1.0));
    }
    const StateDict expected = here.state_dict(), found = there.state_dict();
    for (const auto& [name, value] : expected) {
      if (const auto* tensor = std::get_if<Tensor>(&value)) {
        EXPECT_TRUE(bit_equal(peek(found.tensor(name)), *tensor)) << name;
      } else if (const auto* integer = std::get_if<int64_t>(&value)) {
        EXPECT_EQ(found.integer(name), *integer) << name;
      }
    }
    for (std::size_t i = 0; i < pair.here.size(); ++i) {
      EXPECT_TRUE(bit_equal(peek(pair.there[i].working), pair.here[i].working)) << pair.here[i].name;
      if (pair.here[i].master.defined()) {
        EXPECT_TRUE(bit_equal(peek(pair.there[i].master), pair.here[i].master)) << pair.here[i].name;
      }
    }
  };
  for (const Case& c : kCases)
    for (const MomentStorage moments : {MomentStorage::Fp32, MomentStorage::Bf16}) {
      SCOPED_TRACE(::testing::Message() << to_string(c.storage) << " " << c.low << " " << to_string(moments));
      run(c, AdamWOptions{.lr = 1e-2, .weight_decay = 0.1, .moments = moments});
      run(c, SgdOptions{.lr = 0.1, .moments = moments});
      run(c, SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .moments = moments});
    }
}

/// BF16 moments would stand still if they were rounded to nearest: beta2 = 0.999 moves them by less than half
/// a unit. 4,000 steps of the same gradient bring the second moment to 1 - 0.999^4000 = 0.98 of its square;
/// each rounding is fair, and their sum forgets one in a thousand a step: its deviation is below 2^-8 x
/// sqrt(1000 / 2) / 2 = 4 % for a single weight, 0.2 % for the mean of 512.
TEST(DeviceStep, Bf16MomentsMoveAsFairly) {
  const AtenOnCpu twin;
  const auto weight = make_param("w", torch::ones({512}).requires_grad_(), WeightStorage::Fp32, at::kFloat);
  AdamW optimizer({weight}, {.lr = 1e-6, .betas = {0.9, 0.999}, .moments = MomentStorage::Bf16});
  for (int step = 0; step < 4000; ++step) {
    weight.working.mutable_grad() = torch::full({512}, 0.3);
    (void)optimizer.step({});
  }
  for (const auto& [name, value] : optimizer.state_dict())
    if (const auto* tensor = std::get_if<Tensor>(&value); tensor && tensor->scalar_type() == at::kBFloat16) {
      const double mean = tensor->to(at::kDouble).mean().template item<double>();
      const double expected =
          name.find("second") != std::string::npos ? 0.09 * (1 - std::pow(0.999, 4000)) : 0.3;
      EXPECT_NEAR(mean, expected, 0.01 * expected) << name;
    }
}

// ---- what goes on between the calls

struct Fp16Run {
  explicit Fp16Run(LossScaling scaling, at::Device device = device_under_test()) {
    torch::manual_seed(1);
    model = std::make_shared<Mlp>(4, 8, 3);
    model->to(device);
    Precision precision = Precision::fp16();
    precision.loss_scaling = scaling;
    mp.emplace(precision, *model, MixedPrecisionOptions{.autocast = kAnyMachine});
    optimizer.emplace(mp->params(), AdamWOptions{.lr = 1e-3});
  }
  GradSummary inspected(bool overflow = false) {
    const at::Device device = mp->params().front().working.device();
    const Tensor x = torch::ones({2, 4}).to(device), target = torch::zeros({2}, at::kLong).to(device);
    mp->backward(mp->forward([&] { return model->loss(x, target) * (overflow ? 1e36 : 1.0); }));
    return mp->inspect_grads();
  }
  double step(bool overflow = false) {
    const GradSummary grads = inspected(overflow);
    (void)optimizer->step(grads.unclipped());
    optimizer->zero_grad();
    mp->advance(grads);
    return grads.loss_scale();  // the one that they carried
  }
  std::shared_ptr<Mlp> model;
  std::optional<MixedPrecision> mp;
  std::optional<AdamW> optimizer;
};

TEST(DeviceLossScale, IsTheHostsWhateverIsSetBetweenSteps) {
  Fp16Run run({.initial = 1024, .growth_interval = 100});
  for (int i = 0; i < 7; ++i) run.step();
  run.mp->set_loss_scaling({.initial = 1024, .growth_interval = 5});
  for (int i = 0; i < 12; ++i) {
    const double expected = run.mp->loss_scale();
    EXPECT_EQ(run.step(i == 6), expected) << i;
  }
  // A cap that FP32 does not hold.
  run.mp->set_loss_scaling({.initial = 512, .growth_interval = 1, .floor = 0.3, .cap = 1000.7});
  for (int i = 0; i < 6; ++i) {
    const double expected = run.mp->loss_scale();
    EXPECT_EQ(run.step(), expected) << i;
  }
  const double before = run.mp->loss_scale();
  EXPECT_NE(error_of([&] { run.mp->set_loss_scaling({.hysteresis = 2}); }).find("hysteresis is 2"),
            std::string::npos);
  EXPECT_EQ(run.step(), before);
}

TEST(DeviceLossScale, SaysWhenTheLimitOfSkipsIsPassed) {
  Fp16Run run({.initial = 1024, .max_consecutive_skips = 4});
  const StateDict good = run.mp->state_dict();
  int taken = 0;
  EXPECT_THROW(for (; taken < 20; ++taken) run.step(/*overflow=*/true), SkipLimitError);
  EXPECT_LE(taken, 4);
  // Told once, and forgotten with the steps that a load leaves behind.
  EXPECT_THROW(run.step(true), SkipLimitError);
  run.mp->load_state_dict(good);
  EXPECT_EQ(run.step(), 1024);
}

TEST(DeviceStep, RefusesAnotherOrder) {
  Fp16Run run({.initial = 1024, .growth_interval = 1});
  const GradSummary first = run.inspected();
  run.optimizer->zero_grad();
  run.mp->advance(first);
  EXPECT_NE(error_of([&] { (void)run.optimizer->step(first.unclipped()); }).find("before mp.advance"),
            std::string::npos);
  const GradSummary second = run.inspected();
  EXPECT_NE(error_of([&] { run.mp->advance(first); }).find("of another step"), std::string::npos);
  for (const double factor : {double(INFINITY), double(NAN), -1.0, 1e-42, 1e39})
    EXPECT_NE(error_of([&] {
                (void)run.optimizer->step(second.unclipped().times(factor));
              }).find("are multiplied by"),
              std::string::npos)
        << factor;
}

TEST(DeviceStep, ClippingBelowWhatFp32HoldsIsRefused) {
  const Pair pair(WeightStorage::Fp32, at::kFloat, {4});
  AdamW optimizer(pair.there);
  pair.set_grad(0, torch::zeros({4}));
  EXPECT_NE(error_of([&] {
              (void)optimizer.step(inspect_grads(pair.there).clipped_to(1e-40));
            }).find("Clip to a larger one"),
            std::string::npos);
}

TEST(DeviceStep, SummariesOfAnAbandonedStepAreRefused) {
  Fp16Run run({.initial = 1024});
  const GradSummary abandoned = run.inspected();
  run.mp->zero_grad();
  const GradSummary grads = run.inspected();
  EXPECT_NE(error_of([&] { run.mp->advance(abandoned); }).find("of another step"), std::string::npos);
  run.mp->advance(grads);
}

/// A step without gradients goes the host's way, and drops the copy of a large buffer that has not changed.
TEST(DeviceStep, LargeConstantBuffersSurviveSkippedSteps) {
  struct Masked : Mlp {
    Masked() : Mlp(4, 8, 3) { mask = register_buffer("mask", torch::ones({300, 300})); }
    Tensor mask;
  };
  const auto model = std::make_shared<Masked>();
  model->to(device_under_test());
  MixedPrecision mp(Precision::bf16(), *model, {.autocast = kAnyMachine});
  AdamW optimizer(mp.params());
  mp.advance(mp.inspect_grads());
  const Tensor x = torch::ones({2, 4}).to(device_under_test()),
               target = torch::zeros({2}, at::kLong).to(device_under_test());
  for (const double factor : {1.0, double(NAN), 1.0}) {
    mp.backward(mp.forward([&] { return model->loss(x, target) * factor; }));
    const NoWaits no_waits;
    const GradSummary grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    optimizer.zero_grad();
    mp.advance(grads);
  }
  EXPECT_EQ(mp.loss_scale_state().total_skips, 1);
}

TEST(DeviceStep, RefusedModelsAreLeftAsTheyWere) {
  const auto model = std::make_shared<Mlp>(4, 8, 3);
  model->to(device_under_test());
  Precision fp16 = Precision::fp16();
  fp16.loss_scaling->hysteresis = 2;
  EXPECT_THROW(MixedPrecision(fp16, *model, {.autocast = kAnyMachine}), Error);
  EXPECT_THROW(MixedPrecision(Precision::bf16(), *model,
                              {.autocast = kAnyMachine, .accumulation = Accumulation::Bf16Kahan}),
               Error);
  model->body->ptr(4)->to(at::kCPU);
  EXPECT_THROW(MixedPrecision(Precision::bf16(), *model, {.autocast = kAnyMachine}), Error);
  for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
}

TEST(DeviceStep, ModelsThatMoveAreRefusedByName) {
  for (const Precision& precision : {Precision::fp32(), Precision::bf16()}) {
    const auto model = std::make_shared<Mlp>(4, 8, 3);
    MixedPrecision mp(precision, *model, {.autocast = kAnyMachine, .accumulation = Accumulation::Fp32});
    AdamW optimizer(mp.params());
    model->to(device_under_test());
    EXPECT_NE(error_of([&] { (void)mp.forward([] { return 0; }); }).find("now; it was on cpu"),
              std::string::npos);
    for (const auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    EXPECT_NE(error_of([&] { (void)optimizer.step({}); }).find("now; it was on cpu"), std::string::npos);
  }
  const Pair pair(WeightStorage::Fp32, at::kFloat);
  EXPECT_NE(error_of([&] { (void)inspect_grads({pair.here[0], pair.there[1]}); }).find("of each device"),
            std::string::npos);
}

/// A part of a larger tensor, or FP32 numbers under a BF16 tensor, as torch::load leaves them: nobody can
/// tell.
TEST(DeviceStep, MemoryOfAnotherSizeIsRefused) {
  const Pair pair(WeightStorage::Fp32Master, at::kBFloat16, {8});
  Tensor weight = pair.there[0].working;
  const at::NoGradGuard no_grad;
  weight.set_data(torch::ones({8}).to(device_under_test(), at::kBFloat16));
  EXPECT_TRUE(bit_equal(peek(full_precision(pair.there[0])), torch::ones({8})));
  {
    const Tensor longer = torch::ones({16}).to(device_under_test(), at::kBFloat16);
    weight.set_data(longer.slice(0, 0, 8));
    EXPECT_TRUE(bit_equal(peek(full_precision(pair.there[0])), torch::ones({8})));
    weight.set_data(torch::ones({8}).to(device_under_test(), at::kBFloat16));
    (void)full_precision(pair.there[0]);
    weight.set_data(longer.slice(0, 0, 8));
  }
  EXPECT_NE(error_of([&] { (void)full_precision(pair.there[0]); }).find("a part of a larger tensor"),
            std::string::npos);
}

/// Un-scaled, as on the CPU: FP32 gradients of 2^50 under a scale of 2^-24 are of 2^74, whose squares are
/// Inf.
TEST(DeviceStep, SquaresThatDoNotFitAreSkipped) {
  for (const double scale : {0x1p-24, 1.0, 0x1p20, 0x1p64, 0x1p65, 0x1p100, 0x1p126})
    for (const double size : {0x1p30, 0x1p50, 0x1p62, double(INFINITY), double(NAN)}) {
      const Pair pair(WeightStorage::Fp32, at::kFloat, {4});
      pair.set_grad(0, torch::full({4}, size));
      const bool here = inspect_grads(pair.here, scale).finite();
      EXPECT_EQ(inspect_grads(pair.there, scale).finite(), here) << scale << " " << size;
    }
}

TEST(DeviceStep, GroupsWithAndWithoutMomentum) {
  const auto run = [](const std::vector<Param>& params) {
    SGD optimizer({{{params[0]}, {.lr = 0.1, .momentum = 0.9, .moments = MomentStorage::Bf16}},
                   {{params[1]}, {.lr = 0.1, .moments = MomentStorage::Bf16}}});
    for (int i = 0; i < 3; ++i) {
      for (const Param& param : params) param.working.mutable_grad() = torch::ones_like(param.working);
      (void)optimizer.step({});
    }
    EXPECT_NE(error_of([&] {
                optimizer.set_options(
                    {.lr = 0.1, .momentum = 0.9, .dampening = 0.1, .moments = MomentStorage::Bf16});
              }).find("dampening") != std::string::npos,
              params[0].working.is_cpu());
    return peek(full_precision(params[1]));
  };
  const Pair pair(WeightStorage::Fp32, at::kFloat, {4, 4});
  EXPECT_TRUE(bit_equal(run(pair.there), run(pair.here)));
}

/// A summary and its copies may be read by any thread.
TEST(DeviceStep, ReportsAreReadByManyThreads) {
  for (int round = 0; round < 50; ++round) {
    const Pair pair(WeightStorage::Fp32, at::kFloat, {4, 4});
    for (std::size_t i = 0; i < 2; ++i) pair.set_grad(i, torch::ones({4}));
    const GradSummary grads = inspect_grads(pair.there);
    std::vector<std::thread> threads;
    std::atomic<int> right = 0;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back(
          [grads, &right] { right += grads.finite() && std::abs(grads.norm() - std::sqrt(8)) < 1e-5; });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(right, 4);
  }
}

/// A step of a bad micro-batch that was saved on the CPU, where it is in no sum, is skipped on the device.
TEST(DeviceAccumulation, BadMicroBatchIsRememberedFromOneDeviceToTheOther) {
  const auto make = [](at::Device device) {
    torch::manual_seed(1);
    auto model = std::make_shared<Mlp>(4, 8, 3);
    model->to(device);
    return model;
  };
  const MixedPrecisionOptions options{.autocast = kAnyMachine, .accumulation = Accumulation::Fp32};
  const auto add = [](MixedPrecision& mp, Mlp& model, at::Device device, double factor) {
    const Tensor x = torch::ones({2, 4}).to(device), target = torch::zeros({2}, at::kLong).to(device);
    mp.backward(mp.forward([&] { return model.loss(x, target) * factor; }));
  };
  for (const auto& [from, to] : {std::pair(at::Device(at::kCPU), device_under_test()),
                                 std::pair(device_under_test(), at::Device(at::kCPU)),
                                 std::pair(device_under_test(), device_under_test())}) {
    const auto first = make(from), second = make(to);
    MixedPrecision before(Precision::bf16(), *first, options), after(Precision::bf16(), *second, options);
    add(before, *first, from, 1);
    add(before, *first, from, NAN);
    after.load_state_dict(before.state_dict());
    add(after, *second, to, 1);
    after.close_sum();
    const GradSummary grads = after.inspect_grads();
    EXPECT_FALSE(grads.finite());
    EXPECT_EQ(grads.micro_batch(), 1);
    AdamW optimizer(after.params());
    EXPECT_FALSE(optimizer.step(grads.unclipped()).stepped());
    after.advance(grads);
    EXPECT_EQ(after.loss_scale_state().total_skips, 1);
  }
}

TEST(DeviceStep, WhatOnlyTheKernelsDoIsRefusedByName) {
  const Pair master(WeightStorage::Fp32Master, at::kBFloat16);
  EXPECT_NE(error_of([&] {
              AdamW(master.there, {.moments = MomentStorage::Blockwise8});
            }).find("no operation for 8-bit codes"),
            std::string::npos);
  AdamW there(master.there);
  master.set_grad(0, torch::ones({300}).to(at::kBFloat16));
  EXPECT_NE(error_of([&] { (void)there.step({}, {.stalls = true}); }).find("which updates were lost"),
            std::string::npos);
  std::vector<Param> both = {master.here[0], master.there[1]};
  EXPECT_NE(error_of([&] { AdamW{both}; }).find("an optimizer of its own"), std::string::npos);
}

TEST(DeviceStep, SavedWeightsAreTheCpus) {
  const ScratchFolder scratch;
  const std::string file = scratch / "model.pt";
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const auto model = std::make_shared<ConvNet>(), plain = std::make_shared<ConvNet>();
    model->to(device_under_test());
    TrainStep step(Precision::bf16(), *model, AdamWOptions{.lr = 1e-2},
                   {.precision = {.autocast = kAnyMachine}});
    const at::Tensor x = torch::randn({4, 1, 8, 8}).to(device_under_test());
    const at::Tensor target = torch::randint(10, {4}).to(device_under_test());
    (void)step([&] { return model->loss(x, target); });
    step.mixed_precision().save_weights(file, *model, type);
    for (at::Tensor tensor : plain->parameters()) tensor.set_data(tensor.to(type));
    for (at::Tensor tensor : plain->buffers())
      if (tensor.is_floating_point()) tensor.set_data(tensor.to(type));
    torch::load(plain, file);
    for (const Param& param : step.mixed_precision().params())
      EXPECT_TRUE(bit_equal(plain->named_parameters()[param.name],
                            (type == at::kFloat ? full_precision(param) : param.working).cpu()))
          << param.name;
    for (const auto& item : model->named_buffers()) {
      EXPECT_EQ(item.value().device(), device_under_test());
      EXPECT_TRUE(bit_equal(plain->named_buffers()[item.key()], item.value().is_floating_point()
                                                                    ? item.value().cpu().to(type)
                                                                    : item.value().cpu()));
    }
    EXPECT_TRUE(step([&] { return model->loss(x, target); }).stepped());
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    torch::serialize::InputArchive conv;
    archive.read("conv1", conv);
    at::Tensor weight;
    conv.read("weight", weight);
    EXPECT_TRUE(weight.is_cpu());
  }
}

}  // namespace
}  // namespace halfstep::testing
