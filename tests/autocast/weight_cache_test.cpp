// A weight that changes inside a region is seen at its next use. Stock autocast keeps serving the old cast;
// each test first shows that, so that the day LibTorch mends it the test says so.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>

#include <thread>

#include "support/any_machine.h"
#include "support/run_case.h"

namespace halfstep::testing {
namespace {

constexpr float kOld = 1, kNew = 3;

struct Change {
  const char* how;
  void (*apply)(at::Tensor& weight);
};

// None of these but the first moves the version counter that autograd looks at.
const Change kChanges[] = {
    {"in place",
     [](at::Tensor& weight) {
       const at::NoGradGuard no_grad;
       weight.fill_(kNew);
     }},
    {"through data()", [](at::Tensor& weight) { weight.data().fill_(kNew); }},
    {"by an optimizer step",
     [](at::Tensor& weight) {
       weight.mutable_grad() = at::full_like(weight, kOld - kNew);
       torch::optim::SGD({weight}, torch::optim::SGDOptions(/*lr=*/1)).step();
     }},
    {"through a raw pointer",
     [](at::Tensor& weight) { std::fill_n(static_cast<float*>(weight.data_ptr()), weight.numel(), kNew); }},
};

at::Tensor make_weight() { return at::full({1, 1}, kOld).requires_grad_(); }

float use(const at::Tensor& weight) { return at::linear(at::ones({1, 1}), weight).item<float>(); }

TEST(WeightCache, EveryWayOfChangingAWeightIsSeenAtTheNextUse) {
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.how);
    {
      at::Tensor weight = make_weight();
      const BareAutocast stock(at::kBFloat16);
      EXPECT_EQ(use(weight), kOld);
      change.apply(weight);
      EXPECT_EQ(use(weight), kOld) << "stock autocast no longer serves a stale weight";
    }
    for (const OpPolicy& policy : {OpPolicy::standard(), OpPolicy::stock()}) {
      at::Tensor weight = make_weight();
      const AutocastScope scope(at::kBFloat16, policy, kAnyMachine);
      EXPECT_EQ(use(weight), kOld);
      change.apply(weight);
      EXPECT_EQ(use(weight), kNew);
    }
  }
}

// For operations of others that look at the switch themselves.
TEST(WeightCache, EnginesCacheIsOffInsideTheScopeAndBackAfterwards) {
  {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST(WeightCache, NestedRegionOfAnotherTypeCastsAnew) {
  const at::Tensor weight = make_weight(), x = at::ones({1, 1});
  {
    const BareAutocast outer(at::kBFloat16);
    at::linear(x, weight);
    const BareAutocast inner(at::kHalf);
    EXPECT_THROW(at::linear(x, weight), c10::Error) << "stock autocast no longer mixes up the types";
  }
  for (const OpPolicy& policy : {OpPolicy::standard(), OpPolicy::stock()}) {
    const AutocastScope outer(at::kBFloat16, policy, kAnyMachine);
    EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kBFloat16);
    const AutocastScope inner(at::kHalf, policy, kAnyMachine);
    EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kHalf);
  }
}

TEST(WeightCache, WhatABareRegionAroundTheScopeHasCachedIsNotUsed) {
  at::Tensor weight = make_weight();
  const BareAutocast bare(at::kBFloat16);
  EXPECT_EQ(use(weight), kOld);
  for (const OpPolicy& policy : {OpPolicy::standard(), OpPolicy::stock()}) {
    const AutocastScope scope(at::kBFloat16, policy, kAnyMachine);
    weight.data().fill_(kNew);
    EXPECT_EQ(use(weight), kNew);
  }
}

// at::ThreadLocalState carries the scope to another thread, but not the switch that turns the cache off.
TEST(WeightCache, CacheStaysUnusedOnAThreadThatAScopeWasCarriedTo) {
  for (const OpPolicy& policy : {OpPolicy::standard(), OpPolicy::stock()}) {
    at::Tensor weight = make_weight();
    const AutocastScope scope(at::kBFloat16, policy, kAnyMachine);
    const at::ThreadLocalState state;
    float before = 0, after = 0;
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      ASSERT_TRUE(at::autocast::is_autocast_cache_enabled());
      before = use(weight);
      weight.data().fill_(kNew);
      after = use(weight);
    }).join();
    EXPECT_EQ(before, kOld);
    EXPECT_EQ(after, kNew);
  }
}

// With a cache, all uses of a weight share one cast, and their gradients are summed in BF16 before they reach
// it.
TEST(WeightCache, GradientsOfAWeightThatIsUsedManyTimesAreSummedInFp32) {
  constexpr int kUses = 64;
  at::manual_seed(5);
  const at::Tensor x = at::randn({kUses, 16, 32}), dy = at::randn({kUses, 16, 32}).to(at::kBFloat16);
  const at::Tensor values = at::randn({32, 32});
  // The gradient of the uses numbered [first, last), each in BF16.
  const auto grad_of = [&](int first, int last, auto open_region) {
    const at::Tensor weight = values.clone().requires_grad_();
    std::vector<at::Tensor> outputs, output_grads;
    {
      const auto region = open_region();
      for (int use = first; use < last; ++use) {
        outputs.push_back(at::linear(x[use], weight));
        output_grads.push_back(dy[use]);
      }
    }
    torch::autograd::backward(outputs, output_grads);
    return weight.grad().to(at::kDouble);
  };
  const auto open_scope = [] {
    return std::make_unique<AutocastScope>(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  };
  const auto open_bare = [] { return std::make_unique<BareAutocast>(at::kBFloat16); };

  // Oracle: each use alone, summed in FP64. FP32 rounds each of the 63 additions by 2^-24 of the partial sum.
  at::Tensor sum = at::zeros({32, 32}, at::kDouble), magnitude = at::zeros({32, 32}, at::kDouble);
  for (int use = 0; use < kUses; ++use) {
    const at::Tensor alone = grad_of(use, use + 1, open_scope);
    sum += alone;
    magnitude += alone.abs();
  }
  const at::Tensor bound = kUses * 0x1p-24 * magnitude;
  EXPECT_TRUE(((grad_of(0, kUses, open_scope) - sum).abs() <= bound).all().item<bool>());
  EXPECT_FALSE(((grad_of(0, kUses, open_bare) - sum).abs() <= bound).all().item<bool>())
      << "stock sums in BF16";
}

}  // namespace
}  // namespace halfstep::testing
