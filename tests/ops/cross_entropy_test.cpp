// The cross-entropy of low-precision logits: against FP64, against stock FP32, and what it keeps.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <cmath>

#include "support/any_machine.h"
#include "support/live_bytes.h"

namespace halfstep::testing {
namespace {

constexpr int64_t kIgnored = -100;

struct Case {
  at::ScalarType low = at::kBFloat16;
  at::Tensor logits, target, weight;
  int64_t reduction = at::Reduction::Mean;
  double label_smoothing = 0;
};

Case make_case(int64_t rows, int64_t classes, at::ScalarType low = at::kBFloat16) {
  at::manual_seed(11);
  Case made;
  made.low = low;
  made.logits = (4 * at::randn({rows, classes})).to(low);
  made.target = at::randint(classes, {rows});
  for (int64_t row = 2; row < rows; row += 7) made.target[row] = kIgnored;
  return made;
}

at::Tensor loss_of(const Case& c, const at::Tensor& logits) {
  const at::Tensor weight = c.weight.defined() ? c.weight.to(logits.scalar_type()) : at::Tensor();
  return at::cross_entropy_loss(logits, c.target, weight, c.reduction, kIgnored, c.label_smoothing);
}

struct Result {
  at::Tensor loss, grad;  // FP64
};

/// `open` gives a guard around the forward; logits of `type`.
template <typename Open>
Result run(const Case& c, at::ScalarType type, Open open) {
  const at::Tensor leaf = c.logits.to(type).detach().requires_grad_();
  at::Tensor loss;
  {
    [[maybe_unused]] const auto region = open();
    loss = loss_of(c, leaf);
  }
  loss.backward(at::full_like(loss, 3));
  return {loss.detach().to(at::kDouble), leaf.grad().to(at::kDouble)};
}

const auto no_region = [] { return 0; };
const auto standard = [] { return AutocastScope(at::kBFloat16, OpPolicy::standard(), kAnyMachine); };

Result fp64(const Case& c) { return run(c, at::kDouble, no_region); }
Result ours(const Case& c) { return run(c, c.low, standard); }
/// FP32 copies of the logits through LibTorch's own loss, and the gradient rounded once.
Result stock(const Case& c) {
  Result result = run(c, at::kFloat, no_region);
  result.grad = result.grad.to(c.low).to(at::kDouble);
  return result;
}

double largest_ratio(const at::Tensor& error, const at::Tensor& bound) {
  return (error / bound).max().item<double>();
}

/// p = exp(x - top) / sum in FP32: x - top rounds once, exp is good to 1 ulp, the sum is made of partial
/// sums, at most log2(C) + 16 deep. So p is off by this relative amount; p - q and three multiplications
/// round; then one rounding to the low type.
at::Tensor grad_bound(const Case& c, const Result& exact) {
  const double u = 0x1p-24, depth = std::log2(static_cast<double>(c.logits.size(1))) + 16;
  const at::Tensor x = c.logits.to(at::kDouble);
  const at::Tensor s = x.logsumexp(1, true), p = (x - s).exp();
  const at::Tensor p_error = u * ((x - s).abs() + 2 * depth + 4) * p;
  const double row_grad = 3 * (c.weight.defined() ? c.weight.max().item<double>() : 1);
  const double half_ulp = c.low == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const double half_subnormal = c.low == at::kBFloat16 ? 0x1p-134 : 0x1p-25;
  return row_grad * (p_error + 4 * u) + half_ulp * (1 + 0x1p-10) * exact.grad.abs() + half_subnormal;
}

std::vector<Case> cases() {
  std::vector<Case> made;
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      // 530 rows of 1000 classes are two chunks, the last a small part of one.
      const std::pair<int64_t, int64_t> large =
          reduction == at::Reduction::Mean ? std::pair{530, 1000} : std::pair{9, 300};
      for (const auto& [rows, classes] : {large, {1, 3}, {5, 1}}) {
        Case plain = make_case(rows, classes, low);
        plain.reduction = reduction;
        made.push_back(plain);
        Case smoothed = plain;
        smoothed.label_smoothing = 0.1;
        made.push_back(smoothed);
        Case weighted = plain;
        weighted.weight = (at::rand({classes}) + 0.5).to(low).to(at::kFloat);  // exact in each type
        made.push_back(weighted);
        Case both = weighted;  // goes the plain FP32 way
        both.label_smoothing = 0.1;
        made.push_back(both);
      }
    }
  }
  return made;
}

TEST(LowLogitsCrossEntropy, LossAndGradientAreWithinTheirRoundingsOfFp64) {
  for (const Case& c : cases()) {
    const Result exact = fp64(c), got = ours(c);
    // Each row as for the gradient; the sum over rows and the division add log2(N) + 16 roundings of FP32.
    const double magnitude = c.logits.to(at::kDouble).abs().max().item<double>() + 10;
    const double loss_bound = 64 * 0x1p-24 * magnitude * std::max(1.0, exact.loss.abs().max().item<double>());
    EXPECT_LE((got.loss - exact.loss).abs().max().item<double>(), loss_bound);
    EXPECT_LE(largest_ratio((got.grad - exact.grad).abs(), grad_bound(c, exact)), 1)
        << c.low << " " << c.logits.sizes() << " reduction " << c.reduction;
  }
}

TEST(LowLogitsCrossEntropy, IsAsAccurateAsStockFp32) {
  const auto rms = [](const at::Tensor& error) { return error.pow(2).mean().sqrt().item<double>(); };
  for (const Case& c : cases()) {
    const Result exact = fp64(c), got = ours(c), expected = stock(c);
    // Both round each gradient once; what differs is how the few FP32 roundings before it fall.
    const double few_roundings = 4 * 0x1p-24 * 3 * (c.weight.defined() ? 1.5 : 1);
    EXPECT_LE(rms(got.grad - exact.grad), 1.01 * rms(expected.grad - exact.grad) + few_roundings);
    EXPECT_LE(rms(got.loss - exact.loss), 2 * rms(expected.loss - exact.loss) + 4e-7 * rms(exact.loss));
  }
}

TEST(LowLogitsCrossEntropy, EnginePresetKeepsStockBits) {
  const Case c = make_case(64, 100);
  const auto engine = [] { return AutocastScope(at::kBFloat16, OpPolicy::stock(), kAnyMachine); };
  const Result got = run(c, c.low, engine), expected = stock(c);
  EXPECT_TRUE(at::equal(got.loss, expected.loss));
  EXPECT_TRUE(at::equal(got.grad, expected.grad));
}

TEST(LowLogitsCrossEntropy, RowsThatDoNotCountGiveNoLossWhateverTheyHold) {
  Case c = make_case(20, 50);
  c.target[3] = kIgnored;
  const Result clean = ours(c);
  c.logits[3].fill_(NAN);
  EXPECT_TRUE(at::equal(ours(c).loss, clean.loss));
  c.target.fill_(kIgnored);
  EXPECT_TRUE(std::isnan(ours(c).loss.item<double>())) << "a mean over nothing, as in stock";
}

TEST(LowLogitsCrossEntropy, WhereNothingCountsTheGradientIsZeroAsInStock) {
  for (Case c : cases()) {
    c.target.fill_(kIgnored);
    const Result got = ours(c), expected = stock(c);
    EXPECT_TRUE(at::equal(got.grad, expected.grad)) << c.reduction << " " << c.label_smoothing;
    EXPECT_TRUE(at::equal(got.grad, at::zeros_like(got.grad)));
    EXPECT_TRUE(at::equal(got.loss.isnan(), expected.loss.isnan()));
  }
}

TEST(LowLogitsCrossEntropy, MaskedAndNonFiniteLogitsActAsInStock) {
  Case c = make_case(20, 50);
  c.target.fill_(5);
  c.reduction = at::Reduction::None;
  c.logits.select(1, 7).fill_(-INFINITY);  // a class that is masked away
  c.logits[2].fill_(-INFINITY);
  c.logits[3][9] = INFINITY;
  c.logits[4][9] = NAN;
  const Result got = ours(c), expected = stock(c);
  EXPECT_TRUE(at::equal(got.loss.isnan(), expected.loss.isnan()));
  EXPECT_TRUE(at::equal(got.grad.isnan(), expected.grad.isnan()));
  EXPECT_EQ(got.grad[0][7].item<double>(), 0);
}

TEST(LowLogitsCrossEntropy, ATargetBeyondTheClassesIsAnError) {
  Case c = make_case(4, 50);
  c.target[0] = 50;
  const auto scope = standard();
  EXPECT_THROW(loss_of(c, c.logits), c10::Error);
}

TEST(LowLogitsCrossEntropy, SecondDerivativesAreThoseOfFp64) {
  Case c = make_case(6, 9);
  c.label_smoothing = 0.1;
  const auto second = [&](at::ScalarType type, bool in_scope) {
    const at::Tensor leaf = c.logits.to(type).detach().requires_grad_();
    at::Tensor loss;
    {
      std::optional<AutocastScope> scope;
      if (in_scope) scope.emplace(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
      loss = loss_of(c, leaf);
    }
    const at::Tensor first = torch::autograd::grad({loss}, {leaf}, {}, true, /*create_graph=*/true)[0];
    const at::Tensor direction = at::cos(at::arange(first.numel(), at::kDouble)).view_as(first).to(type);
    return torch::autograd::grad({(first * direction).sum()}, {leaf})[0].to(at::kDouble);
  };
  const at::Tensor exact = second(at::kDouble, false), got = second(at::kBFloat16, true);
  // Gradient, direction and product are BF16: three roundings of 2^-8 on terms that are summed over a row.
  EXPECT_LE((got - exact).abs().max().item<double>(), 4 * 0x1p-8 * exact.abs().sum(1).max().item<double>());
  EXPECT_GT(exact.abs().max().item<double>(), 1e-3);
}

/// A head and its loss as models have them: the logits are a view of a product that nobody holds.
struct Head {
  static constexpr int64_t kRows = 512, kClasses = 4096, kWidth = 8;
  at::Tensor weight = at::randn({kClasses, kWidth}, at::kBFloat16).requires_grad_();
  at::Tensor x = at::randn({4, kRows / 4, kWidth}, at::kBFloat16).requires_grad_();
  at::Tensor target = at::randint(kClasses, {kRows});
  static constexpr int64_t kLogitsBytes = kRows * kClasses * 2;
  static constexpr int64_t kSmall = kLogitsBytes / 20;

  at::Tensor logits() const { return at::linear(x, weight).flatten(0, 1); }
};

TEST(LowLogitsCrossEntropy, KeepsTheLogitsAloneAndWritesTheGradientInTheirPlace) {
  const Head head;
  LiveBytes bytes;
  at::Tensor loss;
  {
    const auto scope = standard();
    loss = torch::nn::functional::cross_entropy(head.logits(), head.target);
  }
  EXPECT_LT(bytes.live(), Head::kLogitsBytes + Head::kSmall);
  const int64_t chunks = 4 * (int64_t{4} << 19);  // FP32 temporaries, a few at a time
  EXPECT_LT(bytes.peak(), Head::kLogitsBytes + Head::kSmall + chunks);
  bytes.forget_peak();
  loss.backward();
  EXPECT_LT(bytes.peak(), Head::kLogitsBytes + Head::kSmall + chunks);
  EXPECT_LT(bytes.live(), Head::kSmall);
}

/// Gradients of the head with the logits' memory seen by somebody else at backward, and what they see then.
TEST(LowLogitsCrossEntropy, LogitsThatSomebodyElseHoldsAreLeftAlone) {
  const Head head;
  const auto gradient_of_x = [&](auto hold) {
    at::Tensor loss, held;
    {
      const auto scope = standard();
      at::Tensor logits = head.logits();
      held = hold(logits);
      loss = at::cross_entropy_loss(logits, head.target);
    }
    const at::Tensor before = held.defined() ? held.detach().clone() : held;
    const at::Tensor grad = torch::autograd::grad({loss}, {head.x})[0];
    if (held.defined()) {
      EXPECT_TRUE(at::equal(held.detach(), before));
    }
    return grad;
  };
  const at::Tensor alone = gradient_of_x([](const at::Tensor&) { return at::Tensor(); });
  const std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>> holders[] = {
      {"itself", [](const at::Tensor& logits) { return logits; }},
      {"a view", [](const at::Tensor& logits) { return logits.narrow(0, 1, 2); }},
      {"detached", [](const at::Tensor& logits) { return logits.detach(); }},
      {"its base", [](const at::Tensor& logits) { return at::Tensor(logits._base()); }},
  };
  for (const auto& [name, hold] : holders) EXPECT_TRUE(at::equal(gradient_of_x(hold), alone)) << name;
}

TEST(LowLogitsCrossEntropy, AnotherUserOfTheLogitsAndAKeptGraphGetTheirGradientsToo) {
  const Head head;
  at::Tensor total;
  {
    const auto scope = standard();
    const at::Tensor logits = head.logits();
    total = at::cross_entropy_loss(logits, head.target) + at::logsumexp(logits, 1).pow(2).mean();
  }
  const auto kept = torch::autograd::grad({total}, {head.x, head.weight}, {}, /*retain_graph=*/true);
  const auto again = torch::autograd::grad({total}, {head.x, head.weight});
  EXPECT_TRUE(at::equal(kept[0], again[0]));
  EXPECT_TRUE(at::equal(kept[1], again[1]));
}

}  // namespace
}  // namespace halfstep::testing
