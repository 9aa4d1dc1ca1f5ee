// Whatever a tensor looks like, the update is right or the tensor is refused by name.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::bit_equal;
using testing::error_of;

torch::Tensor result_with(const torch::Tensor& weights, const torch::Tensor& grad, WeightStorage storage) {
  const Param param = make_param("w", weights, storage, at::kBFloat16);
  AdamW optimizer({param}, {.lr = 0.1});
  param.working.mutable_grad() = grad;
  EXPECT_TRUE(optimizer.step(inspect_grads({param}).clipped_to(2.0)).stepped());
  return full_precision(param).contiguous();
}

TEST(Layout, StridesOfWeightAndGradientDoNotMatter) {
  torch::manual_seed(2);
  const auto weights = torch::randn({6, 7, 5}), grad = torch::randn({6, 7, 5});
  const auto transposed = [](const torch::Tensor& t) {
    return t.transpose(0, 2).contiguous().transpose(0, 2);
  };
  auto wide = torch::zeros({6, 7, 10});
  const auto sliced = wide.slice(2, 0, 10, 2).copy_(grad);
  for (const auto storage : {WeightStorage::Fp32, WeightStorage::Fp32Master, WeightStorage::SplitMaster}) {
    const auto expected = result_with(weights.clone(), grad, storage);
    EXPECT_TRUE(bit_equal(result_with(weights.clone(), transposed(grad), storage), expected));
    EXPECT_TRUE(bit_equal(result_with(weights.clone(), sliced, storage), expected));
    EXPECT_TRUE(bit_equal(result_with(transposed(weights), grad, storage), expected));
    EXPECT_TRUE(bit_equal(result_with(transposed(weights), transposed(grad), storage), expected));
  }
  const auto expanded = torch::ones({1, 1, 1}).expand({6, 7, 5});
  EXPECT_TRUE(bit_equal(result_with(weights.clone(), expanded, WeightStorage::Fp32),
                        result_with(weights.clone(), torch::ones({6, 7, 5}), WeightStorage::Fp32)));
}

// Why the engine's fused step is not simply called: it reads a transposed gradient as if it were not.
TEST(Layout, EnginesFusedStepIsWrongOnATransposedGradient) {
  torch::manual_seed(3);
  const auto weights = torch::randn({6, 7}), grad = torch::randn({6, 7});
  const auto engine = [&](const torch::Tensor& g) {
    auto w = weights.clone();
    at::_fused_adamw_({w}, {g}, {torch::zeros_like(w)}, {torch::zeros_like(w)}, {}, {torch::ones({})}, 0.1,
                      0.9, 0.999, 0.0, 1e-8, false, false);
    return w;
  };
  EXPECT_FALSE(bit_equal(engine(grad), engine(grad.t().contiguous().t())))
      << "LibTorch mended it: the comment in src/tensor/dense.h can go";
}

TEST(Layout, EmptyAndZeroDimensionalTensorsAreTensors) {
  const Param empty = make_param("empty", torch::zeros({0, 3}), WeightStorage::SplitMaster, at::kBFloat16);
  const Param scalar = make_param("scalar", torch::ones({}), WeightStorage::SplitMaster, at::kBFloat16);
  empty.working.mutable_grad() = torch::zeros({0, 3}, at::kBFloat16);
  scalar.working.mutable_grad() = torch::ones({}, at::kBFloat16);
  AdamW optimizer({empty, scalar}, {.lr = 0.25, .weight_decay = 0.0, .moments = MomentStorage::Blockwise8});
  const auto grads = inspect_grads({empty, scalar});
  EXPECT_EQ(grads.norm(), 1.0);
  ASSERT_TRUE(optimizer.step(grads.unclipped()).stepped());
  // The first step of Adam is lr * sign(gradient), up to eps.
  EXPECT_NEAR(full_precision(scalar).item<float>(), 0.75, 1e-6);
  const Param alone = make_param("empty", torch::zeros({0}), WeightStorage::Fp32, at::kFloat);
  alone.working.mutable_grad() = torch::zeros({0});
  EXPECT_TRUE(AdamW({alone}).step(inspect_grads({alone}).clipped_to(1.0)).stepped());
}

TEST(Layout, SharedMemoryIsRefusedByBothNames) {
  const auto memory = torch::randn({10});
  const Param head = make_param("head", memory.slice(0, 0, 6), WeightStorage::Fp32, at::kFloat);
  const Param tail = make_param("tail", memory.slice(0, 5, 10), WeightStorage::Fp32, at::kFloat);
  EXPECT_NE(error_of([&] { AdamW({head, tail}); }).find("'head' and 'tail' share memory"), std::string::npos);
  const Param rest = make_param("rest", memory.slice(0, 6, 10), WeightStorage::Fp32, at::kFloat);
  EXPECT_NO_THROW(AdamW({head, rest}));  // neighbours in one buffer are apart
}

TEST(Layout, ParameterThatChangedSinceTheOptimizerWasBuiltIsRefusedAndNothingIsWritten) {
  const auto refused = [](const char* what, WeightStorage storage, auto&& change) {
    const Param first = make_param("first", torch::ones({4}), WeightStorage::SplitMaster, at::kBFloat16);
    const Param changed = make_param("changed", torch::ones({2, 3}).requires_grad_(), storage, at::kBFloat16);
    AdamW optimizer({first, changed});
    change(changed.working);
    first.working.mutable_grad() = torch::ones({4});
    changed.working.mutable_grad() = torch::ones(changed.working.sizes());
    const auto message = error_of([&] { (void)optimizer.step({}); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
    EXPECT_TRUE(bit_equal(full_precision(first), torch::ones({4})));
  };
  refused("'changed' has shape [20, 3] now", WeightStorage::Fp32,
          [](at::Tensor w) { w.set_data(torch::ones({20, 3})); });
  refused("was changed after the optimizer was built", WeightStorage::Fp32,
          [](at::Tensor w) { w.set_data(torch::ones({3, 2}).t()); });
}

TEST(Layout, ParameterThatWasReplacedByAnotherTypeIsTakenIn) {
  const std::pair<WeightStorage, at::ScalarType> cases[] = {{WeightStorage::Fp32, at::kDouble},
                                                            {WeightStorage::SplitMaster, at::kFloat},
                                                            {WeightStorage::Kahan, at::kHalf}};
  for (const auto& [storage, type] : cases) {
    const Param param = make_param("w", torch::ones({2, 3}).requires_grad_(), storage, at::kBFloat16);
    SGD optimizer({param}, {.lr = 0.25});
    param.working.set_data(at::full({2, 3}, 0.5, type));
    param.working.mutable_grad() =
        torch::ones({2, 3}, storage == WeightStorage::Fp32 ? at::kFloat : at::kBFloat16);
    ASSERT_TRUE(optimizer.step({}).stepped());
    EXPECT_EQ(param.working.scalar_type(), storage == WeightStorage::Fp32 ? at::kFloat : at::kBFloat16);
    // With the split master a value that BF16 holds keeps the remainder below it, here that of 1.
    EXPECT_TRUE(bit_equal(full_precision(param), at::full({2, 3}, 0.25f)));
  }
}

TEST(Layout, WhatTheKernelsCannotReadIsRefusedByName) {
  const auto refused = [](const char* what, auto&& call) {
    const auto message = error_of(call);
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  const auto make = [](const torch::Tensor& tensor, WeightStorage storage = WeightStorage::Fp32) {
    return make_param("w", tensor, storage, at::kHalf);
  };
  refused("'w' is Double, expected Float", [&] { (void)make(torch::ones({3}, at::kDouble)); });
  refused("'w' is not dense", [&] { (void)make(torch::ones({6}).slice(0, 0, 6, 2)); });
  refused("'w' is not dense", [&] { (void)make(torch::ones({1}).expand({6})); });
  refused("holds an Inf or a NaN", [&] { (void)make(torch::full({3}, NAN)); });
  refused("a split master needs a BFloat16",
          [&] { (void)make(torch::ones({3}), WeightStorage::SplitMaster); });

  const Param param = make(torch::ones({4, 2}));
  AdamW optimizer({param});
  const auto before = full_precision(param);
  const auto refused_grad = [&](const char* what, const torch::Tensor& grad) {
    param.working.mutable_grad() = grad;
    refused(what, [&] { (void)inspect_grads({param}); });
    refused(what, [&] { (void)optimizer.step({}); });
  };
  refused_grad("'w' is Double", torch::ones({4, 2}, at::kDouble));
  refused_grad("layout Sparse", torch::ones({4, 2}).to_sparse());
  refused_grad("'w' has shape [2, 4]", torch::ones({2, 4}));
  EXPECT_TRUE(bit_equal(full_precision(param), before));
  refused("expected a Float master", [&] {
    AdamW({Param{.name = "w", .working = torch::ones({3}, at::kHalf), .storage = WeightStorage::Fp32Master}});
  });
  refused("working copy of 'w' is Half, expected Float",
          [&] { AdamW({Param{.name = "w", .working = torch::ones({3}, at::kHalf)}}); });
}

// As ranks will hold it: each its part of a parameter, with the whole one's name.
TEST(Shards, OfAParameterAreRoundedAsTheWhole) {
  for (const auto storage : {WeightStorage::Stochastic, WeightStorage::SplitMaster, WeightStorage::Kahan})
    for (const auto moments : {MomentStorage::Fp32, MomentStorage::Bf16, MomentStorage::Blockwise8}) {
      torch::manual_seed(3);
      const at::Tensor start = torch::randn({2048});
      const auto with = [&](const at::Tensor& values, int64_t first) {
        Param param = make_param("w", values.clone(), storage, at::kBFloat16);
        param.first_element = first;
        return param;
      };
      const Param whole = with(start, 0);
      // Another parameter before it in the same optimizer: its place in the list does not matter either.
      const Param other = make_param("other", torch::ones({5}), storage, at::kBFloat16);
      AdamW whole_optimizer({whole}, {.lr = 1e-3, .moments = moments}, 9);
      std::vector<Param> parts;
      std::vector<AdamW> optimizers;
      for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 512}, {512, 1280}, {1792, 256}}) {
        parts.push_back(with(start.narrow(0, first, count), first));
        optimizers.emplace_back(std::vector<Param>{other, parts.back()},
                                AdamWOptions{.lr = 1e-3, .moments = moments}, 9);
      }
      for (int step = 0; step < 5; ++step) {
        const at::Tensor grad = torch::randn({2048});
        whole.working.mutable_grad() = grad;
        ASSERT_TRUE(whole_optimizer.step({}).stepped());
        std::vector<at::Tensor> values;
        for (std::size_t i = 0; i < parts.size(); ++i) {
          parts[i].working.mutable_grad() =
              grad.narrow(0, parts[i].first_element, parts[i].working.numel()).clone();
          ASSERT_TRUE(optimizers[i].step({}).stepped());
          values.push_back(full_precision(parts[i]));
        }
        ASSERT_TRUE(testing::bit_equal(at::cat(values), full_precision(whole)))
            << to_string(storage) << " " << to_string(moments) << " step " << step;
      }
    }
  Param amid = make_param("w", torch::ones({100}), WeightStorage::Fp32, at::kFloat);
  amid.first_element = 100;
  amid.working.mutable_grad() = torch::ones({100});
  AdamW optimizer({amid}, {.moments = MomentStorage::Blockwise8});
  EXPECT_NE(testing::error_of([&] { (void)optimizer.step({}); }).find("inside a block of 8-bit moments"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
