#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <cmath>

#include "support/any_machine.h"
#include "support/error_of.h"
#include "support/live_bytes.h"
#include "support/small_models.h"

namespace halfstep::testing {
namespace {

constexpr Format kFormats[] = {Format::BF16, Format::E4M3, Format::E5M2};

/// What backward gets for a saved activation: d/dy of sum(y * w) is the w that was saved.
at::Tensor restored(const at::Tensor& values, Format format) {
  const at::Tensor y = at::ones_like(values).requires_grad_(), w = values.detach().clone().requires_grad_();
  at::Tensor sum;
  {
    const CompressedActivations scope(format);
    sum = (y * (w * 1)).sum();  // w * 1: an activation, not a parameter
  }
  return torch::autograd::grad({sum}, {y})[0];
}

/// Values over many orders of magnitude, in blocks of 128 with a common order, and zeros.
at::Tensor wide_values(at::ScalarType type) {
  at::manual_seed(8);
  const at::Tensor orders = at::exp2(at::randint(-12, 12, {40, 1}));
  at::Tensor values = at::randn({40, 200}) * orders * at::exp2(at::randint(-6, 1, {40, 200}));
  values.masked_fill_(at::rand({40, 200}) < 0.05, 0);
  return values.to(type);
}

/// Oracle: the nearest that the format can do, from its traits alone. Half the distance between neighbours is
/// epsilon / 2 of a normal value; below the smallest normal, half of the smallest subnormal. A block's
/// largest lies in the format's top binade or the one below it (where max is not a power of two's last), so
/// both are at most these parts of it.
void expect_within_bound(const at::Tensor& values, const at::Tensor& got, Format format) {
  const auto& t = traits(format);
  const at::Tensor x = values.reshape({-1}).to(at::kDouble), y = got.reshape({-1}).to(at::kDouble);
  const double half_top = std::exp2(std::floor(std::log2(t.max)) - 1);  // a largest value is at least this
  for (int64_t first = 0; first < x.numel(); first += 128) {
    const int64_t count = std::min<int64_t>(128, x.numel() - first);
    const at::Tensor block = x.narrow(0, first, count), error = (y.narrow(0, first, count) - block).abs();
    const double largest = block.abs().max().item<double>();
    const double floor = format == Format::BF16 ? 0 : t.min_subnormal / 2 / half_top * largest;
    EXPECT_TRUE((error <= (block.abs() * t.epsilon / 2).clamp_min(floor)).all().item<bool>())
        << t.name << first;
  }
}

TEST(CompressedActivations, ValuesComeBackWithinOneRounding) {
  for (const Format format : kFormats) {
    const at::Tensor values = wide_values(at::kFloat), got = restored(values, format);
    expect_within_bound(values, got, format);
    EXPECT_FALSE(at::equal(values, got)) << "nothing was compressed";
  }
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    const at::Tensor values = wide_values(low), got = restored(values, Format::E4M3);
    EXPECT_EQ(got.scalar_type(), low);
    // FP16 rounds once more where its subnormals are coarser than E4M3's, scaled.
    const bool may_round = low == at::kHalf;
    if (!may_round) expect_within_bound(values, got, Format::E4M3);
    EXPECT_LT(((got - values).abs().max() / values.abs().max()).item<float>(), 0x1p-4);
    EXPECT_TRUE(at::equal(restored(values, Format::BF16), values)) << "already low: left alone";
  }
}

TEST(CompressedActivations, StatedErrorsAreThoseOfTheFormats) {
  EXPECT_EQ(traits(Format::BF16).epsilon / 2, 0x1p-8);
  EXPECT_EQ(traits(Format::E4M3).epsilon / 2, 0x1p-4);
  EXPECT_EQ(traits(Format::E5M2).epsilon / 2, 0x1p-3);
}

TEST(CompressedActivations, StridesAndTinyAndHugeValuesSurvive) {
  const at::Tensor transposed = wide_values(at::kFloat).t();
  expect_within_bound(transposed.t(), restored(transposed, Format::E4M3).t(), Format::E4M3);
  for (const float scale : {1e-38f, 1e-30f, 3e38f}) {
    const at::Tensor values = at::rand({600}).clamp_min(0.1) * scale;
    for (const Format format : kFormats) {
      const at::Tensor got = restored(values, format);
      EXPECT_LE(((got - values).abs() / values).max().item<float>(), 0x1p-3) << traits(format).name << scale;
    }
  }
}

TEST(CompressedActivations, WhatIsNotFiniteStaysNotFinite) {
  for (const Format format : kFormats) {
    at::Tensor values = at::randn({4, 256});
    values[0][5] = INFINITY;
    values[1][200] = NAN;
    values[3][255] = -INFINITY;
    const at::Tensor got = restored(values, format);
    EXPECT_TRUE(at::equal(got.isfinite(), values.isfinite())) << traits(format).name;
    expect_within_bound(values[2], got[2], format);
  }
}

struct Measured {
  std::vector<at::Tensor> grads;
  int64_t live_bytes;
};

Measured gradients(std::optional<Format> format, bool autocast) {
  at::manual_seed(1);
  TransformerBlock block(/*width=*/64, /*heads=*/2);
  const at::Tensor x = at::randn({2, 32, 64}), weight = at::randn({64, 64}).requires_grad_();
  Measured measured;
  const LiveBytes bytes;
  at::Tensor loss;
  {
    std::optional<AutocastScope> scope;
    if (autocast) scope.emplace(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    std::optional<CompressedActivations> compressed;
    if (format) compressed.emplace(*format);
    loss = block.forward(at::linear(x, weight)).pow(2).mean();
  }
  measured.live_bytes = bytes.live();
  std::vector<at::Tensor> parameters = block.parameters();
  parameters.push_back(weight);
  measured.grads = torch::autograd::grad({loss}, parameters);
  return measured;
}

double relative_error(const Measured& got, const Measured& exact) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.grads.size(); ++i) {
    error += (got.grads[i] - exact.grads[i]).to(at::kDouble).pow(2).sum().item<double>();
    norm += exact.grads[i].to(at::kDouble).pow(2).sum().item<double>();
  }
  return std::sqrt(error / norm);
}

// The header's figures: a rounding is spread evenly, so its root mean square is about epsilon / 2 / sqrt(3)
// of a value, and the errors of a block's few saved tensors add up in a gradient as independent ones do.
TEST(CompressedActivations, GradientsOfABlockAreOffByWhatTheHeaderSays) {
  const Measured exact = gradients(std::nullopt, false);
  double last = 0;
  for (const Format format : kFormats) {
    const double error = relative_error(gradients(format, false), exact);
    RecordProperty(traits(format).name, std::to_string(error));
    EXPECT_LT(error, 3 * traits(format).epsilon / 2 / std::sqrt(3.0)) << traits(format).name;
    EXPECT_GT(error, last) << "each keeps fewer bits than the one before";
    last = error;
  }
}

TEST(CompressedActivations, KeepFewerBytes) {
  const auto bytes = [](std::optional<Format> format, bool autocast) {
    return gradients(format, autocast).live_bytes;
  };
  EXPECT_LT(bytes(Format::BF16, false), 0.6 * static_cast<double>(bytes(std::nullopt, false)));
  EXPECT_LT(bytes(Format::E4M3, false), 0.4 * static_cast<double>(bytes(std::nullopt, false)));
  EXPECT_LT(bytes(Format::E4M3, true), 0.8 * static_cast<double>(bytes(std::nullopt, true)));
}

TEST(CompressedActivations, ATensorThatIsSavedThreeTimesIsKeptOnce) {
  const at::Tensor leaf = at::randn({64, 64}).requires_grad_();
  const CompressedActivations scope(Format::E4M3);
  const LiveBytes bytes;
  at::Tensor y;
  {
    const at::Tensor x = leaf * 2;
    const at::Tensor weights[] = {at::ones({64, 64}), at::ones({64, 64}), at::ones({64, 64})};
    for (const at::Tensor& weight : weights) {
      const at::Tensor product = x.mm(weight.clone().requires_grad_()).sum();
      y = y.defined() ? y + product : product;
    }
  }
  constexpr int64_t kCodes = 64 * 64 + 64 * 64 / 128, kWeights = 3 * 64 * 64 * 4;
  EXPECT_LT(bytes.live(), kCodes + kWeights + 64);
}

TEST(CompressedActivations, WeightsAreNotTouched) {
  at::manual_seed(3);
  const at::Tensor weight = at::randn({64, 64}).requires_grad_(), x = at::randn({8, 64}).requires_grad_();
  const auto input_gradient = [&](bool compress) {
    std::optional<CompressedActivations> compressed;
    if (compress) compressed.emplace(Format::E4M3);
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    return torch::autograd::grad({at::linear(x * 2, weight).sum()}, {x})[0];  // reads the weight's cast alone
  };
  EXPECT_TRUE(at::equal(input_gradient(true), input_gradient(false)));
}

// An error of 1/16 in a logit of 10 would be one of 1.9 in its probability.
TEST(CompressedActivations, LogitsOfALossAreNotTouchedAndTheirMemoryIsStillUsedAgain) {
  constexpr int64_t kRows = 2048, kClasses = 2000, kLogitsBytes = kRows * kClasses * 2;
  at::manual_seed(3);
  const at::Tensor weight = at::randn({kClasses, 16}).requires_grad_(),
                   x = at::randn({kRows, 16}).requires_grad_();
  const at::Tensor target = at::randint(kClasses, {kRows});
  for (const bool autocast : {true, false}) {
    const auto gradient = [&](bool compress) {
      std::optional<CompressedActivations> compressed;
      if (compress) compressed.emplace(Format::E4M3);
      std::optional<AutocastScope> scope;
      if (autocast)  // In FP32 the product of backward has copies of its own.
        scope.emplace(at::kBFloat16, OpPolicy::standard(),
                      AutocastOptions{.allow_emulated = true, .products_in_fp32 = false});
      LiveBytes bytes;
      const at::Tensor loss = at::cross_entropy_loss(at::linear(x, weight), target);
      bytes.forget_peak();
      const at::Tensor grad = torch::autograd::grad({loss}, {x})[0];
      if (autocast) {
        EXPECT_LT(static_cast<double>(bytes.peak()), 1.5 * kLogitsBytes) << compress;
      }
      return grad;
    };
    EXPECT_TRUE(at::equal(gradient(true), gradient(false))) << autocast;
  }
}

TEST(CompressedActivations, OtherFormatsAreRefusedByName) {
  const std::string error = error_of([] { const CompressedActivations scope(Format::E2M1); });
  EXPECT_NE(error.find("cannot keep activations in E2M1. Use Format::BF16"), error.npos) << error;
}

TEST(CompressedActivations, WorkInsideAndAroundACheckpoint) {
  at::manual_seed(3);
  const at::Tensor weight = at::randn({32, 32}).requires_grad_(), x = at::randn({64, 32}).requires_grad_();
  const auto body = [weight](const at::Tensor& x) {
    const CompressedActivations scope(Format::E4M3);
    return at::tanh(x.mm(weight)).exp();
  };
  const auto gradient = [&](const at::Tensor& y) {
    return torch::autograd::grad({y.pow(2).sum()}, {weight})[0];
  };
  const at::Tensor inside = gradient(checkpoint_activations(body, x * 2)), alone = gradient(body(x * 2));
  EXPECT_TRUE(at::equal(inside, alone));
}

}  // namespace
}  // namespace halfstep::testing
