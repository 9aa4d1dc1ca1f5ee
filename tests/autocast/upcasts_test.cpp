// What backward keeps of BF16 tensors that an FP32 operation was given.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/autocast_transcript.h"
#include "support/error_of.h"
#include "support/live_bytes.h"
#include "support/op_cases.h"

namespace halfstep::testing {
namespace upcasts_test {

constexpr int64_t kRows = 64, kWidth = 256, kCount = kRows * kWidth;

OpenRegion scope_that_repeats(bool repeat) {
  return [repeat](at::ScalarType low) {
    return std::make_shared<AutocastScope>(low, OpPolicy::standard(),
                                           AutocastOptions{.allow_emulated = true, .repeat_upcasts = repeat});
  };
}

at::Tensor low_activation() { return (at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_()) * 2; }

at::Tensor layer_norm(const at::Tensor& x) { return at::layer_norm(x, {x.size(-1)}); }

// Oracle of these two: the same scope with the copies kept, as LibTorch does by itself.
TEST(RepeatedUpcasts, EveryModelAndOperationOnLeavesGivesTheBitsOfKeptCopies) {
  const auto repeated = autocast_transcript(scope_that_repeats(true));
  const auto kept = autocast_transcript(scope_that_repeats(false));
  ASSERT_EQ(repeated.size(), kept.size());
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(repeated[i], kept[i]);
}

/// The output of one operation on activations, its gradients, and how many bytes were alive between.
struct Differentiated {
  std::vector<at::Tensor> tensors;
  int64_t live_bytes = 0;
};

Differentiated differentiate(const OpCase& op_case, const std::vector<at::ScalarType>& types, bool repeat) {
  at::manual_seed(7);
  Inputs inputs(types, /*as_activations=*/true);
  Differentiated result;
  const LiveBytes bytes;
  at::Tensor output;
  {
    const auto scope = scope_that_repeats(repeat)(at::kBFloat16);
    output = op_case.call(inputs);
  }
  result.live_bytes = bytes.live();
  torch::autograd::backward({output}, {at::ones_like(output)});
  result.tensors.push_back(output.detach());
  for (const at::Tensor& leaf : inputs.leaves()) result.tensors.push_back(leaf.grad());
  return result;
}

TEST(RepeatedUpcasts, EveryOperationOnActivationsGivesTheBitsOfKeptCopiesInNoMoreBytes) {
  at::set_num_threads(1);  // sums in one order
  int compared = 0, smaller = 0;
  for (const OpCase& op_case : op_cases()) {
    if (!op_case.differentiable) continue;
    for (const auto& types : {std::vector{at::kBFloat16}, std::vector{at::kBFloat16, at::kFloat}}) {
      Differentiated repeated, kept;
      try {
        kept = differentiate(op_case, types, false);
      } catch (const std::exception&) {
        continue;  // refused for these types, by LibTorch or by the policy; other tests ask about that
      }
      ASSERT_NO_THROW(repeated = differentiate(op_case, types, true)) << op_case.op;
      ++compared;
      smaller += repeated.live_bytes < kept.live_bytes;
      EXPECT_LE(repeated.live_bytes, kept.live_bytes) << op_case.op;
      ASSERT_EQ(repeated.tensors.size(), kept.tensors.size());
      for (std::size_t i = 0; i < kept.tensors.size(); ++i) {
        const at::Tensor &a = repeated.tensors[i], &b = kept.tensors[i];
        ASSERT_EQ(a.defined(), b.defined()) << op_case.op;
        if (a.defined()) {
          EXPECT_TRUE(at::allclose(a, b, 0, 0, /*equal_nan=*/true)) << op_case.op;
        }
      }
    }
  }
  EXPECT_GT(compared, 300);
  EXPECT_GT(smaller, 100);
}

TEST(RepeatedUpcasts, ANormKeepsTheLowOriginalAlone) {
  for (const bool repeat : {false, true}) {
    const auto scope = scope_that_repeats(repeat)(at::kBFloat16);
    const at::Tensor x = low_activation();
    const LiveBytes bytes;
    const at::Tensor y = layer_norm(x);
    const int64_t mean_and_rstd = 2 * kRows * 4, output = kCount * 4;
    EXPECT_EQ(bytes.live(), output + mean_and_rstd + (repeat ? 0 : kCount * 4));
  }
}

TEST(RepeatedUpcasts, ViewsOfACopyComeBackAtTheirPlace) {
  const auto gradient = [](bool repeat) {
    at::manual_seed(5);
    const at::Tensor leaf = at::randn({6, 8, 10}, at::kBFloat16).requires_grad_();
    at::Tensor y;
    {
      const auto scope = scope_that_repeats(repeat)(at::kBFloat16);
      // Composite: looks at its input through a transposed view, and saves that.
      y = at::cosine_similarity((leaf * 3).transpose(0, 2), (leaf * leaf).transpose(0, 2), 1);
    }
    return torch::autograd::grad({y.sum()}, {leaf})[0];
  };
  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

TEST(RepeatedUpcasts, SecondDerivativesAreThoseOfKeptCopies) {
  const auto second_derivative = [](bool repeat) {
    at::manual_seed(5);
    const at::Tensor leaf = at::randn({kRows, 16}, at::kBFloat16).requires_grad_();
    const auto scope = scope_that_repeats(repeat)(at::kBFloat16);
    const at::Tensor y = layer_norm(leaf * 2).exp().sum();
    const at::Tensor first = torch::autograd::grad({y}, {leaf}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {leaf})[0];
  };
  const at::Tensor repeated = second_derivative(true);
  EXPECT_GT(repeated.abs().max().item<float>(), 0);
  EXPECT_TRUE(at::equal(repeated, second_derivative(false)));
}

TEST(RepeatedUpcasts, ChangingTheOriginalInPlaceBeforeBackwardIsAnError) {
  const at::Tensor x = low_activation();
  at::Tensor y;
  {
    const auto scope = scope_that_repeats(true)(at::kBFloat16);
    y = layer_norm(x).sum();
  }
  {
    const at::NoGradGuard no_grad;
    x.add_(1);
  }
  const std::string error = error_of([&] { y.backward(); });
  EXPECT_NE(error.find("(BFloat16 [64, 256]) that was changed in place after it was saved"), error.npos)
      << error;
}

// An optimizer changes parameters through data(), which moves no version counter.
TEST(RepeatedUpcasts, ALowParameterMayBeUpdatedBeforeBackward) {
  const auto gradient = [](bool update) {
    at::manual_seed(5);
    const at::Tensor leaf = at::randn({kRows, kWidth}, at::kBFloat16).requires_grad_();
    at::Tensor y;
    {
      const auto scope = scope_that_repeats(true)(at::kBFloat16);
      y = layer_norm(leaf).pow(2).select(1, 0).sum();
    }
    if (update) leaf.data().fill_(7);
    y.backward();
    return leaf.grad();
  };
  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

TEST(RepeatedUpcasts, ASmallPartOfALargeStorageDoesNotHoldIt) {
  const auto scope = scope_that_repeats(true)(at::kBFloat16);
  const LiveBytes bytes;
  at::Tensor y;
  {
    const at::Tensor large = at::ones({1000, 1000}, at::kBFloat16).requires_grad_() * 2;
    y = at::exp(large[3]).sum();
  }
  EXPECT_LT(bytes.live(), 2 * 1000 * 1000 + 100'000) << "the leaf alone is 2 MB; its product as much again";
}

TEST(RepeatedUpcasts, LowRunningStatisticsAreUpdatedAndBackwardStillRuns) {
  const auto scope = scope_that_repeats(true)(at::kBFloat16);
  at::Tensor mean = at::zeros(4, at::kBFloat16), variance = at::ones(4, at::kBFloat16);
  const at::Tensor x = at::randn({16, 4}, at::kBFloat16).requires_grad_();
  const at::Tensor y = at::batch_norm(x * 2 + 1, {}, {}, mean, variance, /*training=*/true, 0.1, 1e-5, false);
  y.pow(2).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_GT(mean.abs().max().item<float>(), 0);
}

}  // namespace upcasts_test
}  // namespace halfstep::testing
