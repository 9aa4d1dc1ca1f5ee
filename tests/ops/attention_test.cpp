// Attention of low-precision heads inside an AutocastScope, against FP64 and against LibTorch's own.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <halfstep/functions.h>
#include <torch/torch.h>

#include "support/live_bytes.h"

namespace halfstep::testing {
namespace attention_test {

using Tensors = std::vector<at::Tensor>;

AutocastScope scope_of(at::ScalarType low) {
  return AutocastScope(low, OpPolicy::standard(), {.allow_emulated = true});
}

struct Options {
  std::optional<at::Tensor> mask = {};
  double dropout = 0;
  bool causal = false;
  std::optional<double> scale = {};
};

at::Tensor attend(const Tensors& leaves, const Options& options) {
  return at::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], options.mask, options.dropout,
                                          options.causal, options.scale, /*enable_gqa=*/true);
}

at::Tensor attend_in_scope(const Tensors& leaves, const Options& options, at::ScalarType low) {
  const auto scope = scope_of(low);
  return attend(leaves, options);
}

Tensors leaves_of(const Tensors& values, at::ScalarType type) {
  Tensors leaves;
  for (const at::Tensor& value : values) leaves.push_back(value.detach().to(type).requires_grad_());
  return leaves;
}

/// Low numbers, in the layout of a layer: the heads of a position side by side.
Tensors some_heads(int64_t batch, int64_t heads, int64_t key_heads, int64_t queries, int64_t keys,
                   int64_t size, at::ScalarType low) {
  at::manual_seed(3);
  const auto rows = [&](int64_t count, int64_t length) {
    return at::randn({batch, length, count, size}).to(low).transpose(1, 2);
  };
  return {rows(heads, queries), rows(key_heads, keys), rows(key_heads, keys)};
}

/// The output, and the gradients of a weighted sum.
Tensors results(const at::Tensor& output, const Tensors& leaves) {
  // Numbers that BF16 and FP16 have: the gradient of a low output is not rounded on its way.
  const at::Tensor weights =
      at::linspace(-1, 1, output.numel(), at::kBFloat16).to(at::kDouble).reshape(output.sizes());
  Tensors found = torch::autograd::grad({(output.to(at::kDouble) * weights).sum()}, leaves);
  found.insert(found.begin(), output.detach());
  return found;
}

Tensors by_us(const Tensors& heads, const Options& options) {
  const at::ScalarType low = heads[0].scalar_type();
  const Tensors leaves = leaves_of(heads, low);
  const at::Tensor output = attend_in_scope(leaves, options, low);
  EXPECT_NE(output.grad_fn()->name().find("halfstep"), std::string::npos);
  return results(output, leaves);
}

Tensors by_libtorch(const Tensors& heads, Options options, at::ScalarType type) {
  const Tensors leaves = leaves_of(heads, type);
  if (options.mask && options.mask->is_floating_point()) options.mask = options.mask->to(type);
  return results(attend(leaves, options), leaves);
}

double off(const at::Tensor& found, const at::Tensor& exact) {
  return ((found.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

/// FP64's answer is the oracle. The error may be no larger than LibTorch's in the same type (a tenth more,
/// for the luck of roundings), which no bound that holds for each element would show; those are in
/// tests/kernels/attention_test.cpp.
void expect_as_exact_as_libtorch(const Tensors& heads, const Options& options, const std::string& what) {
  const Tensors ours = by_us(heads, options), libtorch = by_libtorch(heads, options, heads[0].scalar_type()),
                exact = by_libtorch(heads, options, at::kDouble);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    EXPECT_EQ(ours[i].scalar_type(), heads[0].scalar_type());
    EXPECT_LE(off(ours[i], exact[i]), 1.1 * off(libtorch[i], exact[i])) << what << ", result " << i;
  }
}

TEST(LowRowsAttention, IsAsExactAsLibTorchs) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    const Tensors heads = some_heads(2, 6, 2, 100, 100, 24, low),
                  other = some_heads(2, 2, 2, 40, 90, 32, low);
    const at::Tensor mask = at::randn({2, 1, 40, 90}).to(low);
    expect_as_exact_as_libtorch(heads, {}, "all keys");
    expect_as_exact_as_libtorch(heads, {.causal = true, .scale = 0.3}, "causal");
    expect_as_exact_as_libtorch(other, {}, "more keys than queries");
    expect_as_exact_as_libtorch(other, {.causal = true}, "causal, more keys than queries");
    expect_as_exact_as_libtorch(other, {.mask = mask}, "a mask of numbers");
    expect_as_exact_as_libtorch(other, {.mask = mask.gt(-1)}, "a mask of Bools");
    expect_as_exact_as_libtorch(other, {.mask = mask.gt(-1).narrow(2, 0, 1)}, "one mask for all queries");
  }
}

TEST(LowRowsAttention, HasTheSameBitsOnAnyNumberOfThreadsAndInEveryRun) {
  const int threads = at::get_num_threads();
  // Few heads of a long sequence: backward divides them into parts.
  for (const Tensors& heads :
       {some_heads(1, 4, 2, 600, 600, 16, at::kBFloat16), some_heads(4, 4, 4, 50, 50, 16, at::kBFloat16)}) {
    std::vector<Tensors> found;
    for (const int count : {1, 2, 4, 1}) {
      at::set_num_threads(count);
      found.push_back(by_us(heads, {.causal = true}));
    }
    for (const Tensors& other : found)
      for (std::size_t i = 0; i < other.size(); ++i) EXPECT_TRUE(at::equal(found[0][i], other[i]));
  }
  at::set_num_threads(threads);
}

TEST(LowRowsAttention, AQueryThatSeesNoKeyGivesZeroAsInLibTorch) {
  const Tensors heads = some_heads(1, 2, 2, 20, 30, 16, at::kBFloat16);
  at::Tensor mask = at::ones({20, 30}, at::kBool);
  mask[4].fill_(false);
  for (const bool of_numbers : {false, true}) {
    const at::Tensor given =
        of_numbers ? at::zeros({20, 30}).masked_fill(mask.logical_not(), -INFINITY).to(at::kBFloat16) : mask;
    const Tensors ours = by_us(heads, {.mask = given}),
                  libtorch = by_libtorch(heads, {.mask = given}, at::kBFloat16);
    EXPECT_EQ(ours[0].select(2, 4).abs().max().item<double>(), 0);
    EXPECT_EQ(ours[1].select(2, 4).abs().max().item<double>(), 0);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::isfinite(ours[i]).all().item<bool>());
      EXPECT_TRUE(at::equal(ours[i].eq(0).all(-1), libtorch[i].eq(0).all(-1))) << i;
    }
  }
}

// LibTorch 2.13's plain attention is the witness: its flash attention gives zeros for a NaN query.
TEST(LowRowsAttention, NansAndInfinitiesReachWhatTheyReachInLibTorch) {
  for (const double bad : {std::nan(""), static_cast<double>(INFINITY)})
    for (const int which : {0, 1, 2}) {
      const Tensors heads = some_heads(1, 1, 1, 20, 20, 16, at::kBFloat16);
      heads[static_cast<std::size_t>(which)][0][0][7][3] = bad;
      const Tensors ours = by_us(heads, {});
      at::globalContext().setSDPUseFlash(false);
      const Tensors libtorch = by_libtorch(heads, {}, at::kBFloat16);
      at::globalContext().setSDPUseFlash(true);
      for (std::size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(at::equal(at::isfinite(ours[i]).all(-1), at::isfinite(libtorch[i]).all(-1)))
            << bad << " in argument " << which << ", result " << i;
    }
}

/// The factors of dropout, seen through values that are the rows of an identity, and probabilities that are
/// equal.
at::Tensor kept_by_dropout(double dropout) {
  const at::Tensor zeros = at::zeros({1, 2, 64, 64}), eye = at::eye(64).expand({1, 2, 64, 64});
  return attend_in_scope({zeros, zeros, eye}, {.dropout = dropout}, at::kBFloat16).to(at::kFloat) * 64;
}

// A cast of rows that overlap in memory lays them out in another order.
TEST(LowRowsAttention, TakesFp32WindowsThatOverlap) {
  at::manual_seed(3);
  const at::Tensor windows = at::randn({2, 3, 67}).unfold(2, 48, 1);  // [2, 3, 20, 48]
  const at::Tensor query = at::randn({2, 3, 33, 48}), value = at::randn({2, 3, 20, 48});
  const auto scope = scope_of(at::kBFloat16);
  const auto low = [](const at::Tensor& tensor) { return tensor.contiguous().to(at::kBFloat16); };
  for (const Tensors& heads : {Tensors{query, windows, value}, Tensors{windows, value, value},
                               Tensors{query, value, windows}, Tensors{windows, windows, windows}})
    EXPECT_TRUE(at::equal(attend(heads, {}), attend({low(heads[0]), low(heads[1]), low(heads[2])}, {})));
}

// As LibTorch's: a program may view it, and write to it where no gradient needs it as it was.
TEST(LowRowsAttention, TheOutputLiesAndCanBeWrittenToAsLibTorchs) {
  at::manual_seed(3);
  const at::Tensor contiguous = at::randn({2, 3, 20, 16}).to(at::kBFloat16);
  const at::Tensor of_layer = contiguous.transpose(1, 2).contiguous().transpose(1, 2);
  const at::Tensor part = at::randn({2, 20, 3, 3, 16}).to(at::kBFloat16).select(2, 0).transpose(1, 2);
  for (const at::Tensor& heads : {contiguous, of_layer, part})
    for (const double dropout : {0.0, 0.1}) {
      const at::Tensor expected = attend({heads, heads, heads}, {.dropout = dropout});
      const at::Tensor found = attend_in_scope({heads, heads, heads}, {.dropout = dropout}, at::kBFloat16);
      EXPECT_EQ(found.strides(), expected.strides()) << dropout;
    }
  const at::Tensor bias = at::randn({2, 3, 20, 16}).to(at::kBFloat16).requires_grad_();
  at::Tensor output = attend_in_scope({contiguous, contiguous, contiguous}, {}, at::kBFloat16);
  output.add_(bias).sum().backward();
  EXPECT_TRUE(bias.grad().defined());
  const at::Tensor cos = at::rand({20, 16}), sin = at::rand({20, 16});
  const auto scope = scope_of(at::kBFloat16);
  at::Tensor turned = rotary(of_layer.detach().requires_grad_(), cos, sin);
  turned.mul_(0.5).sum().backward();
}

TEST(LowRowsAttention, DropoutDropsTheShareThatIsAskedForAndFollowsTheSeed) {
  at::manual_seed(11);
  const at::Tensor first = kept_by_dropout(0.25), second = kept_by_dropout(0.25);
  at::manual_seed(11);
  EXPECT_TRUE(at::equal(kept_by_dropout(0.25), first));
  EXPECT_FALSE(at::equal(first, second));
  // 8,192 draws: a share is within 5 standard deviations.
  const double share = first.eq(0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(share, 0.25, 5 * std::sqrt(0.25 * 0.75 / 8192));
  const at::Tensor kept = first.masked_select(first.ne(0));
  EXPECT_LE((kept - 1 / 0.75).abs().max().item<double>(), 1 / 0.75 * 0x1p-8);
}

TEST(LowRowsAttention, BackwardDropsWhatForwardDropped) {
  const Tensors heads = some_heads(1, 2, 1, 64, 64, 64, at::kBFloat16);
  at::manual_seed(11);
  const at::Tensor factors = kept_by_dropout(0.25).ne(0).to(at::kDouble) / 0.75;
  at::manual_seed(11);
  const Tensors ours = by_us(heads, {.dropout = 0.25});
  const Tensors leaves = leaves_of(heads, at::kDouble);
  const at::Tensor p = at::softmax(at::matmul(leaves[0], leaves[1].transpose(2, 3)) / 8, -1);
  const Tensors exact = results(at::matmul(p * factors, leaves[2]), leaves);
  // One rounding is 2^-9 at most; the rounded output adds as much to what backward subtracts.
  for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_LE(off(ours[i], exact[i]), 2 * 0x1p-9) << i;
}

TEST(LowRowsAttention, ACheckpointedRegionDropsTheSameAgain) {
  const Tensors heads = some_heads(1, 2, 2, 64, 64, 16, at::kBFloat16);
  const auto grads = [&](bool checkpointed) {
    at::manual_seed(5);
    const Tensors leaves = leaves_of(heads, at::kBFloat16);
    const auto scope = scope_of(at::kBFloat16);
    const auto run = [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
      return attend({query, key, value}, {.dropout = 0.5});
    };
    const at::Tensor output = checkpointed ? checkpoint_activations(run, leaves[0], leaves[1], leaves[2])
                                           : run(leaves[0], leaves[1], leaves[2]);
    return results(output, leaves);
  };
  const Tensors plain = grads(false), again = grads(true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], again[i])) << i;
}

/// Bytes alive after forward, beside the leaves.
int64_t kept_bytes(const Tensors& heads, bool in_scope, const Options& options) {
  const Tensors leaves = leaves_of(heads, at::kBFloat16);
  const LiveBytes bytes;
  const at::Tensor output =
      in_scope ? attend_in_scope(leaves, options, at::kBFloat16) : attend(leaves, options);
  return bytes.live();
}

TEST(LowRowsAttention, KeepsForBackwardOneNumberAQueryMoreThanLibTorchsFlashAttentionAndLessWithDropout) {
  const Tensors heads = some_heads(2, 4, 2, 64, 64, 32, at::kBFloat16);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // other threads report nothing
  // The largest logit of a query apart from the logarithm of its sum, where LibTorch adds the two.
  const int64_t queries = 2 * 4 * 64;
  EXPECT_EQ(kept_bytes(heads, true, {.causal = true}),
            kept_bytes(heads, false, {.causal = true}) + queries * 4);
  // The output and these two FP32 numbers a query: the unfused attention keeps matrices.
  EXPECT_EQ(kept_bytes(heads, true, {.dropout = 0.5}), queries * (32 * 2 + 2 * 4));
  EXPECT_GT(kept_bytes(heads, false, {.dropout = 0.5}), queries * 64 * 2);
  at::set_num_threads(threads);
}

TEST(LowRowsAttention, CanBeDifferentiatedTwice) {
  for (const bool causal : {false, true}) {
    const Tensors heads = some_heads(1, 4, 2, 20, 20, 8, at::kHalf);
    const auto second = [&](const Tensors& leaves, const at::Tensor& output) {
      const Tensors first =
          torch::autograd::grad({output.to(at::kDouble).pow(3).sum()}, leaves, {}, true, true);
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const at::Tensor& grad : first) sum = sum + grad.to(at::kDouble).pow(2).sum();
      Tensors found = torch::autograd::grad({sum}, leaves);
      found.insert(found.end(), first.begin(), first.end());
      return found;
    };
    const Tensors low = leaves_of(heads, at::kHalf), wide = leaves_of(heads, at::kDouble);
    const Tensors found = second(low, attend_in_scope(low, {.causal = causal}, at::kHalf));
    at::globalContext().setSDPUseFlash(false);
    const Tensors exact = second(wide, attend(wide, {.causal = causal}));
    at::globalContext().setSDPUseFlash(true);
    // Each of some ten steps rounds to FP16.
    for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_LE(off(found[i], exact[i]), 10 * 0x1p-11) << i;
  }
}

}  // namespace attention_test
}  // namespace halfstep::testing
