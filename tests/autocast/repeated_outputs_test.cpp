// What backward keeps of the outputs of GELU, SiLU and norms that a product takes.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <atomic>

#include "support/error_of.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace {

constexpr int64_t kRows = 64, kWidth = 256, kCount = kRows * kWidth;
constexpr int64_t kLowBytes = kCount * 2;

AutocastScope scope_that_repeats(bool repeat, at::ScalarType low = at::kBFloat16) {
  return AutocastScope(low, OpPolicy::standard(), {.allow_emulated = true, .repeat_outputs = repeat});
}

using Function = std::function<at::Tensor(const at::Tensor&)>;

struct Cheap {
  const char* name;
  Function run;
};

/// Parameters of norms; FP32, as MixedPrecision keeps them.
const at::Tensor& gain() {
  static const at::Tensor made = at::linspace(0.5, 1.5, kWidth).requires_grad_();
  return made;
}

std::vector<Cheap> cheap_operations() {
  return {
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      {"gelu tanh", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
      {"silu", [](const at::Tensor& x) { return at::silu(x); }},
      {"layer_norm", [](const at::Tensor& x) { return at::layer_norm(x, {kWidth}, gain(), gain(), 1e-3); }},
      {"rms_norm", [](const at::Tensor& x) { return at::rms_norm(x, {kWidth}, gain(), 1e-3); }}};
}

/// Two products with something between, and all gradients.
std::vector<at::Tensor> gradients_of(
    const Function& between, bool repeat, at::ScalarType low = at::kBFloat16,
    const std::function<void()>& before_backward = [] {}) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({kRows, kWidth}).requires_grad_();
  const at::Tensor up = at::randn({kWidth, kWidth}).div_(16).requires_grad_();
  const at::Tensor down = at::randn({kWidth, kWidth}).div_(16).requires_grad_();
  at::Tensor loss;
  {
    const auto scope = scope_that_repeats(repeat, low);
    loss = at::linear(between(at::linear(x, up)), down).pow(2).sum();
  }
  before_backward();
  return torch::autograd::grad({loss}, {x, up, down});
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                  const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_GT(a[i].abs().max().item<float>(), 0) << what;
    EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", gradient " << i;
  }
}

// Oracle of these tests: the same scope with the outputs kept, as LibTorch does by itself.
TEST(RepeatedOutputs, GradientsHaveTheBitsOfKeptOutputs) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    for (const auto& [name, run] : cheap_operations()) {
      expect_equal(gradients_of(run, true, low), gradients_of(run, false, low), name);
    }
  }
}

TEST(RepeatedOutputs, TheOutputIsNotHeldForBackward) {
  for (const auto& [name, run] : cheap_operations()) {
    const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
    const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2;
    int64_t live[2];
    for (const bool repeat : {false, true}) {
      const LiveBytes bytes;
      at::Tensor y;
      {
        const auto scope = scope_that_repeats(repeat);
        y = at::linear(run(x), weight);
      }
      live[repeat] = bytes.live();
    }
    // Less one low tensor; a norm adds a copy of its gain and its bias.
    EXPECT_LE(live[true], live[false] - kLowBytes + 2 * kWidth * 4) << name;
  }
}

TEST(RepeatedOutputs, ThreeProductsOfOneNormHoldNoneOfItsCopies) {
  const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2;
  const LiveBytes bytes;
  std::vector<at::Tensor> outputs;
  {
    const auto scope = scope_that_repeats(true);
    const at::Tensor y = at::layer_norm(x, {kWidth});
    for (int i = 0; i < 3; ++i) outputs.push_back(at::linear(y, weight));
  }
  const int64_t mean_and_rstd = 2 * kRows * 4;
  EXPECT_EQ(bytes.live(), 3 * kLowBytes + mean_and_rstd);
}

/// Three products of one output, one of a part of it: each asks for it in backward.
std::vector<at::Tensor> gradients_of_three(const Function& run, bool repeat, int backwards = 1) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
  std::vector<at::Tensor> leaves{x};
  for (int i = 0; i < 3; ++i)
    leaves.push_back(at::randn({kWidth, kWidth}).div_(16).to(at::kBFloat16).requires_grad_());
  at::Tensor loss;
  {
    const auto scope = scope_that_repeats(repeat);
    const at::Tensor y = run(x * 2);
    const at::Tensor some_rows = at::linear(y.narrow(0, 8, 16), leaves[3]);
    loss = (at::linear(y, leaves[1]) * at::linear(y, leaves[2])).pow(2).sum() + some_rows.pow(2).sum();
  }
  std::vector<at::Tensor> gradients;
  for (int i = 0; i < backwards; ++i)
    gradients = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/i + 1 < backwards);
  return gradients;
}

TEST(RepeatedOutputs, ThreeProductsOfOneOutputHaveTheBitsOfAKeptOne) {
  for (const auto& [name, run] : cheap_operations())
    for (const int backwards : {1, 2})
      expect_equal(gradients_of_three(run, true, backwards), gradients_of_three(run, false), name);
}

/// How often `body` computes a layer norm.
int norms_in(const std::function<void()>& body) {
  static std::atomic<int> norms;
  norms = 0;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(call.name()) == "aten::layer_norm") ++norms;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return norms;
}

TEST(RepeatedOutputs, ThreeProductsOfOneOutputComputeItOnce) {
  const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2;
  at::Tensor loss;
  {
    const auto scope = scope_that_repeats(true);
    const at::Tensor y = at::layer_norm(x, {kWidth});
    loss = (at::linear(y, weight) + at::linear(y, weight) + at::linear(y, weight)).sum();
  }
  EXPECT_EQ(norms_in([&] { loss.backward(); }), 1);
}

/// One product for each of the rows of an output, which the policy casts or does not; with a product of all.
at::Tensor loss_of_rows(const at::Tensor& x, const at::Tensor& weight, bool repeat, bool all_too) {
  const auto scope = scope_that_repeats(repeat);
  const at::Tensor y = at::layer_norm(x * 2, {kWidth});
  at::Tensor loss = all_too ? at::linear(y, weight).pow(2).sum() : at::zeros({});
  for (const at::Tensor& row : y.unbind(0)) loss = loss + at::linear(row.unsqueeze(0), weight).pow(3).sum();
  return loss;
}

TEST(RepeatedOutputs, ManyViewsOfOneOutputComputeItOncePerBackward) {
  for (const auto type : {at::kBFloat16, at::kFloat}) {
    for (const bool all_too : {false, true}) {
      at::manual_seed(6);
      const at::Tensor weight = at::randn({kWidth, kWidth}).div_(16).to(type).requires_grad_();
      const at::Tensor x = at::randn({kRows, kWidth}).to(type).requires_grad_();
      const auto gradients = [&](const at::Tensor& loss, bool keep) {
        return torch::autograd::grad({loss}, {x, weight}, {}, keep);
      };
      const auto expected = gradients(loss_of_rows(x, weight, false, all_too), false);
      const at::Tensor loss = loss_of_rows(x, weight, true, all_too);
      for (const bool keep : {true, true, false}) {
        EXPECT_EQ(norms_in([&] { expect_equal(gradients(loss, keep), expected, "rows"); }), 1) << type;
      }
    }
  }
}

TEST(RepeatedOutputs, ManyViewsOfOneOutputTakeNoMoreMemoryInBackwardThanKeptOnes) {
  for (const auto type : {at::kBFloat16, at::kFloat}) {
    const at::Tensor weight = at::randn({kWidth, kWidth}).div_(16).to(type).requires_grad_();
    const at::Tensor x = at::randn({kRows, kWidth}).to(type).requires_grad_();
    int64_t peak[2];
    for (const bool repeat : {false, true}) {
      LiveBytes bytes;
      const at::Tensor loss = loss_of_rows(x, weight, repeat, false);
      bytes.forget_peak();
      (void)torch::autograd::grad({loss}, {x, weight});
      peak[repeat] = bytes.peak();
    }
    // While the output is computed it stands beside its parts, with the FP32 copy of its input: 8 bytes an
    // element that are gone before the sum of the gradients, in FP32, is at its highest.
    EXPECT_LE(peak[true], peak[false] + 8 * kCount) << type;
  }
}

TEST(RepeatedOutputs, NothingIsHeldAfterBackward) {
  for (const auto& [name, run] : cheap_operations()) {
    const LiveBytes bytes;
    gradients_of_three(run, true);
    EXPECT_EQ(bytes.live(), 0) << name;
  }
}

TEST(RepeatedOutputs, ViewsComeBackAtTheirPlace) {
  for (const auto& [name, run] : cheap_operations()) {
    const auto some_rows = [&run = run](const at::Tensor& x) { return run(x).narrow(0, 8, 16); };
    expect_equal(gradients_of(some_rows, true), gradients_of(some_rows, false), name);
    const auto columns = [&run = run](const at::Tensor& x) {
      return run(x).view({4, kRows / 4, kWidth}).narrow(1, 3, 8).transpose(0, 1);
    };
    expect_equal(gradients_of(columns, true), gradients_of(columns, false), name);
  }
}

TEST(RepeatedOutputs, AnOutputChangedInPlaceBeforeTheProductIsKept) {
  for (const auto& [name, run] : cheap_operations()) {
    const auto changed = [&run = run](const at::Tensor& x) { return run(x).mul_(3); };
    expect_equal(gradients_of(changed, true), gradients_of(changed, false), name);
  }
}

TEST(RepeatedOutputs, ChangingTheInputInPlaceBeforeBackwardIsAnError) {
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2;
  const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
  at::Tensor y;
  {
    const auto scope = scope_that_repeats(true);
    y = at::linear(at::gelu(x), weight).sum();
  }
  {
    const at::NoGradGuard no_grad;
    x.add_(1);
  }
  EXPECT_NE(error_of([&] { y.backward(); }).find("changed in place after it was saved"), std::string::npos);
}

// An optimizer changes parameters through data(), which moves no version counter.
TEST(RepeatedOutputs, ANormsGainMayBeUpdatedBeforeBackward) {
  const at::Tensor own_gain = at::ones(kWidth).requires_grad_();
  const auto norm = [&](const at::Tensor& x) { return at::layer_norm(x, {kWidth}, own_gain); };
  const auto weight_gradient = [&](bool update) {
    own_gain.data().fill_(1);
    return gradients_of(norm, true, at::kBFloat16, [&] { own_gain.data().fill_(update ? 7 : 1); })[2];
  };
  EXPECT_TRUE(at::equal(weight_gradient(true), weight_gradient(false)));
}

TEST(RepeatedOutputs, SecondDerivativesAreThoseOfKeptOutputs) {
  for (const auto& [name, run] : cheap_operations()) {
    const auto second_derivative = [&run = run](bool repeat) {
      at::manual_seed(5);
      const at::Tensor x = at::randn({8, kWidth}).requires_grad_();
      const at::Tensor weight = at::randn({kWidth, kWidth}).div_(16).requires_grad_();
      const auto scope = scope_that_repeats(repeat);
      const at::Tensor loss = at::linear(run(x * 2), weight).pow(2).sum();
      const at::Tensor first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
      return torch::autograd::grad({first.pow(2).sum()}, {x, weight});
    };
    expect_equal(second_derivative(true), second_derivative(false), name);
  }
}

TEST(RepeatedOutputs, BackwardInsideAnotherScopeRepeatsWhatForwardDid) {
  for (const auto& [name, run] : cheap_operations()) {
    const auto gradients = [&run = run](bool repeat) {
      std::optional<AutocastScope> other;
      auto result = gradients_of(run, repeat, at::kBFloat16, [&] {
        other.emplace(at::kHalf, OpPolicy::standard(), AutocastOptions{.allow_emulated = true});
      });
      return result;
    };
    expect_equal(gradients(true), gradients(false), name);
  }
}

// Codes of elements with gaps between them must not come back in another order.
TEST(RepeatedOutputs, ACompressedInputWithGapsInAnotherOrderGivesTheSameGradient) {
  const auto gradient = [](bool repeat) {
    at::manual_seed(3);
    const at::Tensor leaf = at::randn({kWidth, 2 * kRows}).requires_grad_();
    const at::Tensor weight = at::randn({kWidth, kWidth}).div_(16).requires_grad_();
    at::Tensor loss;
    {
      const auto scope = scope_that_repeats(repeat);
      const CompressedActivations compress(Format::E4M3);
      loss = at::matmul(at::gelu((leaf * 2).transpose(0, 1).narrow(0, 0, kRows)), weight).pow(2).sum();
    }
    return torch::autograd::grad({loss}, {weight})[0];
  };
  const at::Tensor kept = gradient(false);
  // Both are off by E4M3's rounding of one tensor; in another order they would have nothing in common.
  EXPECT_LT((gradient(true) - kept).norm().item<double>(), 0.1 * kept.norm().item<double>());
}

TEST(RepeatedOutputs, ASparseArgumentAfterANormIsLeftAlone) {
  const at::Tensor x = at::randn({kRows, kWidth}).requires_grad_() * 2;
  const auto scope = scope_that_repeats(true);
  const at::Tensor y = at::layer_norm(x, {kWidth});
  EXPECT_EQ(at::sum(at::eye(4).to_sparse()).item<float>(), 4);
}

TEST(RepeatedOutputs, AnInnerScopeThatDoesNotRepeatKeepsWhatAnOuterOneNoted) {
  const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_() * 2;
  const LiveBytes bytes;
  const auto outer = scope_that_repeats(true);
  at::Tensor y = at::gelu(x), z;
  {
    const auto inner = scope_that_repeats(false);
    z = at::linear(y, weight);
  }
  y.reset();
  EXPECT_EQ(bytes.live(), 2 * kLowBytes);
}

TEST(RepeatedOutputs, NothingIsHeldAfterTheScope) {
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
  const LiveBytes bytes;
  {
    const auto scope = scope_that_repeats(true);
    at::gelu(x * 2);
  }
  EXPECT_EQ(bytes.live(), 0);
}

TEST(RepeatedOutputs, ACompressedInputServesBothOperations) {
  const auto bytes_of = [](bool repeat) {
    const at::Tensor weight = at::randn({kWidth, kWidth}, at::kBFloat16).requires_grad_();
    const at::Tensor leaf = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
    const LiveBytes bytes;
    at::Tensor y;
    {
      const auto scope = scope_that_repeats(repeat);
      const CompressedActivations compress(Format::E4M3);
      y = at::linear(at::gelu(leaf * 2), weight);
    }
    return bytes.live();
  };
  // An output and one code or two: a byte an element, and an exponent a block.
  EXPECT_LT(bytes_of(true), kLowBytes + kCount * 1.1);
  EXPECT_GT(bytes_of(false), kLowBytes + kCount * 2);
}

// The norm lies outside: were it noted, the second run would be shown other tensors than the first.
TEST(RepeatedOutputs, ACheckpointedRegionThatBeginsWithAProductOfANormGivesTheSameBits) {
  const auto region = [](const at::Tensor& x) {
    return at::linear(at::gelu(at::linear(x, gain().diag())), gain().diag());
  };
  const auto plain = [&](const at::Tensor& x) { return region(at::layer_norm(x, {kWidth})); };
  const auto checkpointed = [&](const at::Tensor& x) {
    return checkpoint_activations(region, at::layer_norm(x, {kWidth}));
  };
  expect_equal(gradients_of(checkpointed, true), gradients_of(plain, false), "checkpointed");
}

TEST(RepeatedOutputs, ASecondRunWithinBackwardHoldsNothingAfterwards) {
  const at::Tensor x = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
  const LiveBytes bytes;
  {
    at::Tensor y;
    {
      const auto scope = scope_that_repeats(true);
      y = checkpoint_activations([](const at::Tensor& in) { return at::gelu(in * 2); }, x).sum();
    }
    y.backward();
  }
  EXPECT_EQ(bytes.live(), kLowBytes) << "the gradient";
}

}  // namespace
}  // namespace halfstep::testing
