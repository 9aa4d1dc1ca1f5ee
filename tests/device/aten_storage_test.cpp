// Weight storages by ATen's operations have the bits of the kernels.
#include "tensor/aten_storage.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "kernels/update.h"
#include "support/bits.h"
#include "support/counting_device.h"
#include "tensor/dense.h"

namespace halfstep::testing {
namespace {

constexpr WeightStorage kStorages[] = {WeightStorage::Fp32,        WeightStorage::Fp32Master,
                                       WeightStorage::SplitMaster, WeightStorage::Kahan,
                                       WeightStorage::Stochastic,  WeightStorage::Nearest};

/// Numbers of all magnitudes, ties of BF16 and FP16, zeros of both signs, and what is not finite.
at::Tensor values_of_all_kinds() {
  torch::manual_seed(5);
  const at::Tensor exponents = torch::randint(-140, 127, {20000}).to(at::kFloat);
  at::Tensor values = torch::randn({20000}) * torch::exp2(exponents);
  const at::Tensor ties =
      torch::randint(0, 1 << 30, {4000}, at::kInt).bitwise_and(0x7fff0000).bitwise_or(0x8000);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  return torch::cat(
      {values, ties.view(at::kFloat), -ties.view(at::kFloat),
       torch::tensor({0.0f, -0.0f, inf, -inf, nan, -nan, 3.396e38f, 3.4e38f, 65504.0f, 65520.0f})});
}

struct Stored {
  at::Tensor working, master;
};

at::Tensor master_like(WeightStorage storage, const at::Tensor& working) {
  switch (storage) {
    case WeightStorage::Fp32Master:
      return torch::zeros_like(working, at::kFloat);
    case WeightStorage::SplitMaster:
      return torch::zeros_like(working, at::kShort);
    case WeightStorage::Kahan:
      return torch::zeros_like(working);
    default:
      return {};
  }
}

void* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

UpdateLayout layout_of(WeightStorage storage, at::ScalarType low) {
  return {.working = *training_format(low), .weights = storage};
}

/// NaNs are compared as NaNs: their payload is nobody's.
::testing::AssertionResult same(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return ::testing::AssertionFailure() << "one is undefined";
  if (!a.defined()) return ::testing::AssertionSuccess();
  const auto without_nans = [](const at::Tensor& t) {
    return t.is_floating_point() ? t.nan_to_num(7, INFINITY, -INFINITY) : t;
  };
  if (a.is_floating_point() && !a.isnan().equal(b.isnan()))
    return ::testing::AssertionFailure() << "other NaNs";
  if (bit_equal(without_nans(a), without_nans(b))) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "other bits";
}

void for_each_storage(auto&& body) {
  for (const WeightStorage storage : kStorages)
    for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
      if (storage == WeightStorage::SplitMaster && low == at::kHalf) continue;
      SCOPED_TRACE(::testing::Message() << to_string(storage) << " " << low);
      body(storage, storage == WeightStorage::Fp32 ? at::kFloat : low);
      if (storage == WeightStorage::Fp32) break;
    }
}

TEST(AtenStorage, StoresAndLoadsTheBitsOfTheKernels) {
  const at::Tensor values = values_of_all_kinds();
  const auto count = static_cast<std::size_t>(values.numel());
  for_each_storage([&](WeightStorage storage, at::ScalarType low) {
    const at::Tensor working = torch::zeros_like(values, low), master = master_like(storage, working);
    store_weights(layout_of(storage, low), values.const_data_ptr<float>(), data_of(working), data_of(master),
                  count);
    const at::Tensor ours = torch::zeros_like(values, low), our_master = master_like(storage, ours);
    store_weights_by_aten(storage, values, ours, our_master);
    // Where the working copy is an Inf, Kahan's rest is Inf - Inf: a NaN to both, and nobody reads it.
    EXPECT_TRUE(same(ours, working));
    EXPECT_TRUE(same(our_master, master));

    // After edits of every kind, too.
    const at::Tensor places = torch::randint(values.numel(), {5000});
    working.index_copy_(0, places, values.flip(0).index_select(0, places).to(low));
    working.slice(0, 0, 100).zero_();
    at::Tensor expected = torch::zeros_like(values);
    load_weights(layout_of(storage, low), data_of(working), data_of(master),
                 expected.mutable_data_ptr<float>(), count);
    EXPECT_TRUE(same(load_weights_by_aten(storage, working, master), expected));
  });
}

TEST(AtenStorage, RunsOnADeviceWithoutWaiting) {
  const at::Tensor values = values_of_all_kinds(), there = values.to(kCountingDevice);
  for_each_storage([&](WeightStorage storage, at::ScalarType low) {
    const at::Tensor working = torch::zeros_like(values, low), master = master_like(storage, working);
    const at::Tensor on_device = torch::zeros_like(there, low), its_master = master_like(storage, on_device);
    store_weights_by_aten(storage, values, working, master);
    at::Tensor loaded;
    {
      const NoWaits no_waits;
      store_weights_by_aten(storage, there, on_device, its_master);
      loaded = load_weights_by_aten(storage, on_device, its_master);
    }
    EXPECT_TRUE(same(peek(on_device), working));
    EXPECT_TRUE(same(peek(loaded), load_weights_by_aten(storage, working, master)));
  });
}

/// Words of 32 fair bits: each bit is set in half of them, none goes with another bit, another element or
/// another step. 4.5 standard deviations each of 2^18 words: a correct source fails once in 100 runs of all.
TEST(RandomWords, AreFair) {
  constexpr int64_t kCount = 1 << 18;
  const auto bits_at = [&](std::uint32_t key, int step) {
    const at::Tensor words = random_words(kCount, key, torch::tensor(step, at::kInt)).to(at::kLong);
    return words.unsqueeze(1).bitwise_right_shift(torch::arange(32)).bitwise_and(1).to(at::kDouble).sub(0.5);
  };
  const double bound = 4.5 * 0.25 / std::sqrt(double(kCount));
  const at::Tensor bits = bits_at(7, 0);
  EXPECT_LE(bits.mean(0).abs().max().item<double>(), 2 * bound);
  const auto correlations = [&](const at::Tensor& other) { return bits.t().mm(other) / kCount; };
  EXPECT_LE((correlations(bits) - 0.25 * torch::eye(32, at::kDouble)).abs().max().item<double>(), bound);
  EXPECT_LE(correlations(bits.roll(1, 0)).abs().max().item<double>(), bound);
  EXPECT_LE(correlations(bits_at(7, 1)).abs().max().item<double>(), bound);
  EXPECT_LE(correlations(bits_at(8, 0)).abs().max().item<double>(), bound);
}

/// Every value becomes one of its two neighbours, the mean of many roundings is the value: 5 standard
/// deviations of a coin whose sides are a unit apart.
TEST(RoundedAtRandom, IsFairBetweenTheTwoNeighbours) {
  torch::manual_seed(11);
  constexpr int64_t kDraws = 1 << 14;
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(low);
    const at::Tensor values = torch::cat({torch::randn({40}), torch::randn({40}) * 0x1p-15,
                                          torch::randn({40}) * 0x1p-24, torch::randn({40}) * 1000});
    const at::Tensor many = values.unsqueeze(1).expand({-1, kDraws}).contiguous();
    const at::Tensor words = random_words(many.numel(), 3, torch::tensor(9, at::kInt)).view_as(many);
    const at::Tensor rounded = rounded_at_random(many, low, words).to(at::kDouble);
    const at::Tensor lowest = std::get<0>(rounded.min(1)), highest = std::get<0>(rounded.max(1));
    const at::Tensor exact = values.to(at::kDouble);
    EXPECT_TRUE((lowest <= exact).logical_and(exact <= highest).all().item<bool>());
    // At most one unit in the last place apart: none of the format's numbers lies between.
    const at::Tensor middle = ((lowest + highest) / 2).to(low).to(at::kDouble);
    EXPECT_TRUE(middle.eq(lowest).logical_or(middle.eq(highest)).all().item<bool>());
    const at::Tensor off = (rounded.mean(1) - exact).abs();
    EXPECT_TRUE(
        (off <= (highest - lowest) * (5 * 0.5 / std::sqrt(double(kDraws)) + 0x1p-13)).all().item<bool>());
  }
}

TEST(RoundedAtRandom, LeavesWhatTheFormatHoldsAndWhatIsNotFinite) {
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    const at::Tensor codes = torch::arange(-32768, 32768).to(at::kShort);
    const at::Tensor values = codes.view(low).to(at::kFloat);
    const at::Tensor words = random_words(values.numel(), 3, torch::tensor(1, at::kInt));
    EXPECT_TRUE(same(rounded_at_random(values, low, words), values.to(low)));
  }
}

}  // namespace
}  // namespace halfstep::testing
