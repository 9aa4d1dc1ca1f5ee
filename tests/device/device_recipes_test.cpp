// Recipes on an accelerator: the codes and scales of the CPU's kernels, products by LibTorch's own operation,
// histories that follow the device's verdicts without one wait for it.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cmath>

#include "quant/on_device.h"
#include "quant/session.h"
#include "support/any_machine.h"
#include "support/bits.h"
#include "support/counting_device.h"
#include "support/error_of.h"

namespace halfstep::testing::device_recipes_test {

using at::Tensor;

std::vector<Tensor> matrices() {
  at::manual_seed(5);
  const Tensor plain = at::randn({37, 50});
  Tensor outliers = plain.clone(), mixed = at::randn({37, 50}) * at::pow(2.0, at::arange(50) * 5 - 125);
  outliers.select(1, 7).mul_(1e4);
  mixed.select(0, 3).zero_();
  return {plain, outliers, mixed, at::zeros({37, 50}), plain.to(at::kBFloat16), (plain * 1e-3).to(at::kHalf)};
}

const OperandRule kRules[] = {{.format = Format::E4M3},
                              {.format = Format::E5M2},
                              {.format = Format::E4M3, .scale = ScaleRule::PowerOfTwo},
                              {.format = Format::E5M2, .scale = ScaleRule::Unscaled},
                              {.format = Format::E4M3, .scale = ScaleRule::PowerOfTwo, .block_across = 1},
                              {.format = Format::E4M3, .scale = ScaleRule::Fp32, .block_across = 1}};

Quantised there(const Tensor& matrix, const OperandRule& rule, bool over_rows, int margin = 0) {
  const Tensor moved = matrix.to(device_under_test());
  return quantised_on_device(moved, rule, over_rows, largest_on_device(moved, rule, over_rows), margin);
}

TEST(DeviceRecipes, CodesAndScalesAreThoseOfTheCpusKernels) {
  int number = 0;
  for (const Tensor& matrix : matrices()) {
    ++number;
    for (const OperandRule& rule : kRules)
      for (const bool over_rows : {false, true})
        for (const int margin : {0, 2}) {
          const bool one_scale = rule.block_across == 0;
          if (margin != 0 && !one_scale) continue;
          SCOPED_TRACE(detail::concat("matrix ", number, ", ", traits(rule.format).name, ", scale rule ",
                                      static_cast<int>(rule.scale), ", over rows ", over_rows));
          QuantiseCounts counts;
          const Quantised here =
              quantised(matrix, {.rule = rule, .sums_over_rows = over_rows, .margin = margin}, counts);
          const Quantised found = there(matrix, rule, over_rows, margin);
          // A zero keeps its sign in both; -0 and 0 are different codes.
          EXPECT_TRUE(at::equal(found.codes.to(at::kCPU).view(at::kByte), here.codes));
          const Tensor scales = found.scales.to(at::kCPU).reshape({-1});
          if (one_scale) {
            EXPECT_EQ(scales.item<float>(), here.outer_scale);
          } else {
            EXPECT_TRUE(at::equal(scales, here.scales.reshape({-1})));
          }
        }
  }
}

TEST(DeviceRecipes, WhatIsNotFiniteStaysVisible) {
  for (const OperandRule& rule : kRules)
    for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
      Tensor matrix = at::ones({32, 32});
      matrix[3][4] = bad;
      const Quantised left = there(matrix, rule, false);
      const Quantised right = there(at::ones({16, 32}), kRules[0], false);
      const Tensor product = product_on_device(left, right, {}, at::kFloat).to(at::kCPU);
      EXPECT_FALSE(std::isfinite(product[3][0].item<float>()));
      EXPECT_TRUE(std::isfinite(product[2][0].item<float>()));
    }
}

// An element of a product is off by the roundings of a sum of k terms in FP32 and by one of the result:
// (k + 2) 2^-24 times the sum of the terms' magnitudes, and half a unit of BF16, 2^-9 of what is written.
TEST(DeviceRecipes, ProductsAreThoseOfTheDecodedOperands) {
  at::manual_seed(6);
  struct Sizes {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Sizes{32, 48, 64}, Sizes{7, 20, 50}, Sizes{1, 16, 33}, Sizes{0, 16, 16}})
    for (const OperandRule& rule : kRules)
      for (const bool left_over_rows : {false, true})
        for (const bool right_over_rows : {false, true})
          for (const at::ScalarType output : {at::kBFloat16, at::kFloat}) {
            const Tensor x = at::randn({m, k}), w = at::randn({n, k}) * 0.1;
            const Tensor bias = at::randn({n}).to(at::kBFloat16);
            const OperandRule& weight_rule = rule.block_across == 0 ? kRules[0] : rule;
            const auto turned = [](const Tensor& matrix, bool over_rows) {
              return over_rows ? matrix.t().contiguous() : matrix;
            };
            const Quantised left = there(turned(x, left_over_rows), rule, left_over_rows);
            const Quantised right = there(turned(w, right_over_rows), weight_rule, right_over_rows);
            const auto exact = [](const Quantised& matrix) {
              const Tensor values =
                  matrix.codes.to(at::kCPU).to(at::kDouble) * matrix.scales.to(at::kCPU).to(at::kDouble);
              return matrix.sums_over_rows ? values.t() : values;
            };
            const Tensor found =
                product_on_device(left, right, bias.to(device_under_test()), output).to(at::kCPU);
            EXPECT_EQ(found.scalar_type(), output);
            const Tensor a = exact(left), b = exact(right).t();
            const Tensor expected = a.mm(b) + bias.to(at::kDouble);
            const Tensor magnitudes = a.abs().mm(b.abs()) + bias.to(at::kDouble).abs();
            const bool in_bf16 = output == at::kBFloat16 || rule.block_across == 1;
            // Beside FP32 the bias is added to what was written, and rounded with it once more.
            const Tensor bound = magnitudes * (static_cast<double>(k) + 2) * 0x1p-24 +
                                 (in_bf16 ? 2 * 0x1p-8 : 0x1p-23) * magnitudes;
            EXPECT_TRUE(((found.to(at::kDouble) - expected).abs() <= bound).all().item<bool>())
                << m << " x " << n << " x " << k;
          }
}

struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(16, 32))),
        middle(register_module("middle", torch::nn::Linear(32, 48))),
        other(register_module("other", torch::nn::Linear(torch::nn::LinearOptions(48, 32).bias(false)))),
        last(register_module("last", torch::nn::Linear(32, 16))) {}
  Tensor forward(const Tensor& x) { return last(at::gelu(other(at::gelu(middle(at::gelu(first(x))))))); }
  torch::nn::Linear first, middle, other, last;
};

struct Loop {
  Loop(Precision precision, at::Device device)
      : model([&] {
          at::manual_seed(11);
          auto made = std::make_shared<Net>();
          made->to(device);
          return made;
        }()),
        mp(std::move(precision), *model, {.autocast = kAnyMachine}),
        optimizer(mp.params(), {.lr = 1e-2}),
        device(device) {}

  void step(const Tensor& x) {
    const Tensor moved = x.to(device);
    const std::optional<NoWaits> no_waits =
        device.is_cpu() ? std::nullopt : std::optional<NoWaits>(std::in_place);
    mp.backward(mp.forward([&] { return model->forward(moved).to(at::kFloat).square().mean(); }));
    const GradSummary grads = mp.inspect_grads();
    (void)optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    optimizer.zero_grad();
  }
  std::vector<float> history(const std::string& role, const std::string& weight) const {
    const Tensor saved = mp.state_dict().tensor("recipe.amax." + role + "." + weight);
    return {saved.const_data_ptr<float>(), saved.const_data_ptr<float>() + saved.numel() - 1};
  }

  std::shared_ptr<Net> model;
  MixedPrecision mp;
  AdamW optimizer;
  at::Device device;
};

Tensor batch(int step) {
  at::manual_seed(100 + step);
  return at::randn({24, 16});
}

// Products are rounded to BF16 here and there, and sums are made in another order: a largest magnitude may be
// off by some units of BF16, here four of 2^-8 for each of six steps.
TEST(DeviceRecipes, TrainAsOnTheCpuWithoutAWait) {
  for (const Precision& precision :
       {Precision::fp8_delayed(), Precision::fp8_current(), Precision::fp8_rowwise()}) {
    SCOPED_TRACE(precision.name());
    Loop here(precision, at::kCPU), on_device(precision, device_under_test());
    for (int step = 0; step < 6; ++step) {
      Tensor x = batch(step);
      if (step == 3) x[2][2] = std::numeric_limits<float>::infinity();
      here.step(x);
      on_device.step(x);
    }
    EXPECT_EQ(on_device.mp.loss_scale_state().total_skips, 1);
    EXPECT_EQ(on_device.mp.quantised_uses("middle.weight"), 6);
    // AdamW's first steps are of one size for every element, whichever sign its gradient has. One that is
    // next to 0 may have the other sign there, but not many can.
    const double moves = 5 * 1e-2;
    const auto expected = here.model->named_parameters(), found = on_device.model->named_parameters();
    for (const auto& item : expected) {
      const Tensor off =
          (found[item.key()].to(at::kCPU).to(at::kDouble) - item.value().to(at::kDouble)).abs();
      EXPECT_LE(off.max().item<double>(), 2 * moves) << item.key();
      EXPECT_LE(off.mean().item<double>(), moves / 20) << item.key();
    }
    if (!precision.recipe->delayed) continue;
    for (const char* role : {"input", "weight", "grad"}) {
      const auto past = here.history(role, "middle.weight"), there = on_device.history(role, "middle.weight");
      ASSERT_EQ(past.size(), 5u) << role;
      ASSERT_EQ(there.size(), 5u) << role;
      for (std::size_t i = 0; i < past.size(); ++i)
        EXPECT_NEAR(there[i], past[i], 24 * 0x1p-8 * past[i] * (std::string(role) == "grad" ? 8 : 1))
            << role << i;
    }
  }
}

TEST(DeviceRecipes, HistoriesWrapAroundAndLeaveOutSkippedSteps) {
  for (const auto take : {DelayedScaling::Take::Max, DelayedScaling::Take::MostRecent}) {
    const DelayedScaling options{.history = 3, .take = take};
    AmaxHistory here;
    AmaxHistoryOnDevice on_device;
    const auto scalar = [](float value) { return at::full({}, value, at::kFloat).to(device_under_test()); };
    const float noted[] = {2, 7, 1, NAN, 5, INFINITY, 3, 4, 0.5f};
    for (int step = 0; step < 9; ++step) {
      const bool skipped = step == 6;
      const Tensor found = on_device.amax(options, scalar(100)).to(at::kCPU);
      EXPECT_EQ(found.item<float>(), here.amax(options).value_or(100)) << step;
      here.note(noted[step] / 2);
      here.note(noted[step]);
      on_device.note(scalar(noted[step] / 2));
      on_device.note(scalar(noted[step]));
      EXPECT_TRUE(bit_equal(on_device.saved(), here.saved())) << step;
      here.end_step(skipped, 3);
      on_device.end_step(scalar(skipped), 3);
      EXPECT_TRUE(at::equal(on_device.saved(), here.saved())) << step;
      if (step == 4) {  // a checkpoint between them
        AmaxHistoryOnDevice loaded;
        loaded.load(on_device.saved(), 3, device_under_test());
        on_device = loaded;
      }
    }
  }
}

TEST(DeviceRecipes, ARunMovesFromADeviceToTheCpuAndBack) {
  Loop on_device(Precision::fp8_delayed(), device_under_test()), here(Precision::fp8_delayed(), at::kCPU);
  for (int step = 0; step < 3; ++step) on_device.step(batch(step));
  const StateDict saved = on_device.mp.state_dict();
  here.mp.load_state_dict(saved);
  EXPECT_EQ(here.history("grad", "other.weight"), on_device.history("grad", "other.weight"));
  here.step(batch(3));
  Loop again(Precision::fp8_delayed(), device_under_test());
  again.mp.load_state_dict(here.mp.state_dict());
  EXPECT_EQ(again.history("input", "other.weight"), here.history("input", "other.weight"));
  EXPECT_EQ(again.history("input", "other.weight").size(), 4u);
}

TEST(DeviceRecipes, WithScalesOfBlocksAreRefusedByName) {
  for (const Precision& precision : {Precision::fp8_block(), Precision::mxfp8(), Precision::nvfp4()}) {
    const std::string error = error_of([&] { Loop(precision, device_under_test()); });
    EXPECT_NE(error.find(std::string(precision.name())), std::string::npos) << error;
    EXPECT_NE(error.find("at::_scaled_mm"), std::string::npos) << error;
  }
}

}  // namespace halfstep::testing::device_recipes_test
