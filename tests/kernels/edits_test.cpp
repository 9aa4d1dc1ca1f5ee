// Working copies that somebody writes to between two steps: the companion counts only where it rounds to
// them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/update.h"

namespace halfstep {
namespace {

constexpr std::size_t kCount = 1000;  // whole vectors, and a rest that the twin does

struct Storage {
  WeightStorage weights;
  Format working;
};
constexpr Storage kStorages[] = {
    {WeightStorage::Fp32Master, Format::BF16},  {WeightStorage::Fp32Master, Format::FP16},
    {WeightStorage::SplitMaster, Format::BF16}, {WeightStorage::Kahan, Format::BF16},
    {WeightStorage::Kahan, Format::FP16},
};

struct Weights {
  std::vector<std::uint16_t> working = std::vector<std::uint16_t>(kCount);
  std::vector<std::uint32_t> companion = std::vector<std::uint32_t>(kCount);  // room for FP32

  std::vector<float> loaded(const UpdateLayout& layout, const KernelTable& table) const {
    std::vector<float> values(kCount);
    load_weights(layout, working.data(), companion.data(), values.data(), kCount, table);
    return values;
  }
};

Weights trained(const UpdateLayout& layout, const KernelTable& table) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 0.1f);
  std::vector<float> values(kCount);
  for (float& value : values) value = normal(random);
  Weights weights;
  store_weights(layout, values.data(), weights.working.data(), weights.companion.data(), kCount, table);
  return weights;
}

double value_of(std::uint16_t code, Format format) { return decode_float(code, format); }

/// Half a unit in the last place, at and above the value.
double half_ulp(double value, Format format) {
  const int digits = format == Format::BF16 ? 8 : 11, smallest = format == Format::BF16 ? -133 : -24;
  const int exponent = value == 0 ? smallest : std::max(std::ilogb(value) - digits + 1, smallest);
  return std::ldexp(0.5, exponent);
}

struct Moments {
  std::vector<float> first, second;
};

void take_adamw_step(const UpdateLayout& layout, const AdamWStep& step, Weights& weights,
                     const std::vector<float>& grads, Moments& moments, const KernelTable& table) {
  (void)adamw_update(layout, step,
                     {.working = weights.working.data(),
                      .companion = weights.companion.data(),
                      .grad = grads.data(),
                      .first_moment = moments.first.data(),
                      .second_moment = moments.second.data(),
                      .count = kCount},
                     table);
}

TEST(EditedWeights, LoadAsAValueThatRoundsToWhatWasWritten) {
  for (const KernelTable* table : available_kernels())
    for (const auto& [storage, working] : kStorages) {
      const UpdateLayout layout{.working = working, .weights = storage};
      const Weights before = trained(layout, *table);
      const auto full_before = before.loaded(layout, *table);
      Weights edited = before;
      std::mt19937 random(9);
      // Zeros of both signs, small and large values, the largest below 1, powers of two, subnormals.
      const std::uint16_t codes[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x3c00, 0xbc00, 0x3f80, 0x3f7f, 0x1234};
      for (std::size_t i = 0; i < kCount; i += 2) edited.working[i] = codes[random() % std::size(codes)];
      const auto full = edited.loaded(layout, *table);
      for (std::size_t i = 0; i < kCount; ++i) {
        const double written = value_of(edited.working[i], working);
        ASSERT_FALSE(std::isnan(full[i])) << i;
        ASSERT_LE(std::abs(full[i] - written), half_ulp(written, working))
            << i << " storage " << to_string(storage) << " code " << edited.working[i];
        if (edited.working[i] == before.working[i]) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(full[i]), std::bit_cast<std::uint32_t>(full_before[i]));
        }
        if ((edited.working[i] & 0x7fff) == 0 && storage != WeightStorage::SplitMaster) {
          ASSERT_EQ(full[i], 0);
        }
      }
    }
}

// An Inf and a NaN of every payload, beside every remainder and compensation. Whatever is written stays, and
// the step after it says so: nothing that was a NaN becomes a number.
TEST(EditedWeights, WhatIsNotFiniteStays) {
  const AdamWStep step = adamw_step({.learning_rate = 1e-2}, 3);
  const std::vector<float> grads(kCount, 0.01f);
  const std::uint16_t companions[] = {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xbfff, 0xffff};
  for (const KernelTable* table : available_kernels())
    for (const auto& [storage, working] : kStorages) {
      const UpdateLayout layout{.working = working, .weights = storage};
      const std::uint16_t inf = working == Format::BF16 ? 0x7f80 : 0x7c00;
      for (const std::uint16_t companion : companions) {
        Weights weights = trained(layout, *table);
        // Two-byte companions are varied; an FP32 master stays the one of the weight that was there before.
        if (storage != WeightStorage::Fp32Master)
          std::fill_n(reinterpret_cast<std::uint16_t*>(weights.companion.data()), kCount, companion);
        for (std::size_t i = 0; i < kCount; ++i) {
          const auto payload = static_cast<std::uint16_t>(i / 2 % (0x8000 - inf));  // 0 is the Inf itself
          weights.working[i] = static_cast<std::uint16_t>((inf + payload) | (i % 2 ? 0x8000 : 0));
        }
        const std::vector<std::uint16_t> written = weights.working;
        const auto expect_kept = [&](float value, std::size_t i, const char* when) {
          const bool nan = (written[i] & 0x7fff) > inf;
          ASSERT_EQ(std::isnan(value), nan)
              << when << " " << to_string(storage) << " " << written[i] << " " << companion;
          if (nan) return;
          ASSERT_EQ(value, (i % 2 ? -1 : 1) * std::numeric_limits<float>::infinity()) << when;
        };
        const auto full = weights.loaded(layout, *table);
        for (std::size_t i = 0; i < kCount; ++i) expect_kept(full[i], i, "loaded");
        Moments moments{std::vector<float>(kCount, 0.02f), std::vector<float>(kCount, 1e-4f)};
        take_adamw_step(layout, step, weights, grads, moments, *table);
        const auto after = weights.loaded(layout, *table);
        for (std::size_t i = 0; i < kCount; ++i) {
          const auto working_after = static_cast<float>(value_of(weights.working[i], working));
          if (storage == WeightStorage::Kahan) {  // adds the decay as a number of its own: Inf - Inf is a NaN
            ASSERT_FALSE(std::isfinite(after[i]) || std::isfinite(working_after)) << written[i];
            continue;
          }
          expect_kept(after[i], i, "loaded after a step");
          expect_kept(working_after, i, "after a step");
        }
      }
    }
}

// Whoever repairs a NaN writes over a master that is one: of whatever payload, also those whose bits lie next
// to a zero's or an Inf's.
TEST(EditedWeights, WhatIsWrittenOverANaNMasterCounts) {
  const AdamWStep step = adamw_step({.learning_rate = 1e-2}, 3);
  const std::vector<float> grads(kCount, 0.01f);
  const std::uint32_t masters[] = {0xffffffff, 0xffffe000, 0xffff8000, 0x7fffffff, 0x7fff8000,
                                   0x7f800001, 0x7f808000, 0xff800001, 0xff808000, 0x7fc00000};
  for (const Format working : {Format::BF16, Format::FP16}) {
    const UpdateLayout layout{.working = working, .weights = WeightStorage::Fp32Master};
    const std::uint16_t inf = working == Format::BF16 ? 0x7f80 : 0x7c00;
    const std::uint16_t codes[] = {0x0000, 0x8000, inf, static_cast<std::uint16_t>(inf | 0x8000), 0x3c00};
    for (const KernelTable* table : available_kernels()) {
      Weights weights;
      for (std::size_t i = 0; i < kCount; ++i) {
        weights.working[i] = codes[i % std::size(codes)];
        weights.companion[i] = masters[i / std::size(codes) % std::size(masters)];
      }
      const auto full = weights.loaded(layout, *table);
      for (std::size_t i = 0; i < kCount; ++i)
        ASSERT_EQ(full[i], float(value_of(weights.working[i], working)));
      Moments moments{std::vector<float>(kCount, 0.02f), std::vector<float>(kCount, 1e-4f)};
      take_adamw_step(layout, step, weights, grads, moments, *table);
      for (const float value : weights.loaded(layout, *table)) ASSERT_FALSE(std::isnan(value)) << table->isa;
    }
  }
}

// FP32 files hold NaNs of any payload; rounded like a number, 0x7fffffff would become -0.
TEST(EditedWeights, NaNsOfAnyPayloadAreStoredAsNaNs) {
  std::vector<float> values(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::uint32_t payload = i % 4 ? 0x007fffffu - std::uint32_t(i / 4) * 0x2000u : 1 + std::uint32_t(i);
    values[i] = std::bit_cast<float>(0x7f800000u | payload | (i % 2 ? 0x80000000u : 0));
  }
  for (const KernelTable* table : available_kernels())
    for (const auto& [storage, working] : kStorages) {
      const UpdateLayout layout{.working = working, .weights = storage};
      Weights weights;
      store_weights(layout, values.data(), weights.working.data(), weights.companion.data(), kCount, *table);
      const auto full = weights.loaded(layout, *table);
      for (std::size_t i = 0; i < kCount; ++i) {
        ASSERT_TRUE(std::isnan(full[i])) << to_string(storage) << " " << i;
        ASSERT_TRUE(std::isnan(value_of(weights.working[i], working))) << to_string(storage) << " " << i;
      }
    }
}

// Any working copy may be written beside any compensation.
TEST(EditedWeights, KahanCompensationCountsUpToHalfAUnitInTheLastPlace) {
  for (const KernelTable* table : available_kernels())
    for (const Format format : {Format::BF16, Format::FP16}) {
      const UpdateLayout layout{.working = format, .weights = WeightStorage::Kahan};
      const std::uint32_t one_and_a_half = format == Format::BF16 ? 0x3fc0 : 0x3e00;
      for (int steps = -40; steps <= 40; ++steps) {
        Weights weights;
        auto* compensations = reinterpret_cast<std::uint16_t*>(weights.companion.data());
        // Half a unit in the last place of 1.5, and its neighbours.
        const double half = half_ulp(1.5, format);
        const auto code = static_cast<std::uint16_t>(encode_float(static_cast<float>(half), format) + steps);
        for (std::size_t i = 0; i < kCount; ++i) {
          weights.working[i] = static_cast<std::uint16_t>(one_and_a_half + i % 64);
          compensations[i] = static_cast<std::uint16_t>(code | (i % 2 ? 0x8000 : 0));
        }
        const auto full = weights.loaded(layout, *table);
        for (std::size_t i = 0; i < kCount; ++i) {
          const double written = value_of(weights.working[i], format);
          const double expected = steps <= 0 ? written + value_of(compensations[i], format) : written;
          ASSERT_EQ(full[i], static_cast<float>(expected)) << traits(format).name << " " << steps << " " << i;
        }
      }
    }
}

TEST(EditedWeights, StepStartsFromWhatLoads) {
  // SGD with a power of two as rate and no other term: next = weight - 2^-6 * grad, one rounding in FP32.
  const SgdStep step{.learning_rate = 0x1p-6, .random = {}};
  const std::vector<float> grads(kCount, 1.0f);
  for (const KernelTable* table : available_kernels())
    for (const auto& [storage, working] : kStorages) {
      const UpdateLayout layout{.working = working, .weights = storage};
      Weights weights = trained(layout, *table);
      for (std::size_t i = 0; i < kCount; i += 3) weights.working[i] = 0;
      const auto start = weights.loaded(layout, *table);
      (void)sgd_update(layout, step,
                       {.working = weights.working.data(),
                        .companion = weights.companion.data(),
                        .grad = grads.data(),
                        .count = kCount},
                       *table);
      const auto end = weights.loaded(layout, *table);
      for (std::size_t i = 0; i < kCount; ++i) {
        const double expected = double(start[i]) - 0x1p-6;
        // FP32 rounds the sum once; a Kahan pair holds it to half an ulp of its compensation, whose size is
        // at most half an ulp of the working copy.
        const double kahan = half_ulp(half_ulp(expected, working), working) * 2;
        const double bound = 0x1p-24 * std::abs(expected) + (storage == WeightStorage::Kahan ? kahan : 0);
        ASSERT_LE(std::abs(end[i] - expected), bound) << i << " " << to_string(storage);
      }
    }
}

TEST(EditedWeights, FusedStepAgreesWithTheTwinOnEditedWeights) {
  const AdamWStep step = adamw_step({.learning_rate = 1e-2}, 3);
  const std::vector<float> grads(kCount, 0.01f);
  for (const auto& [storage, working] : kStorages) {
    const UpdateLayout layout{.working = working, .weights = storage};
    std::vector<Weights> results;
    for (const KernelTable* table : available_kernels()) {
      Weights weights = trained(layout, *table);
      for (std::size_t i = 0; i < kCount; i += 3) weights.working[i] = i % 2 ? 0 : 0x8000;
      for (std::size_t i = 1; i < kCount; i += 3) weights.working[i] = 0x3e00;
      Moments moments{std::vector<float>(kCount, 0.02f), std::vector<float>(kCount, 1e-4f)};
      take_adamw_step(layout, step, weights, grads, moments, *table);
      results.push_back(weights);
      ASSERT_EQ(results.back().working, results.front().working) << to_string(storage);
      ASSERT_EQ(results.back().companion, results.front().companion) << to_string(storage);
    }
  }
}

TEST(EditedWeights, UneditedWeightsAreNeverTakenForEdited) {
  // A thousand AdamW steps of a size that moves the working copy now and then. An unedited master rounds to
  // its working copy, so clearing what does not changes nothing: the step from a copy whose stale companions
  // were cleared by hand must have the same bits.
  for (const auto& [storage, working] : kStorages) {
    const UpdateLayout layout{.working = working, .weights = storage};
    const KernelTable& table = kernels();
    Weights weights = trained(layout, table);
    std::vector<float> grads(kCount);
    Moments moments{std::vector<float>(kCount, 0), std::vector<float>(kCount, 0)};
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0, 1e-2f);
    for (int number = 1; number <= 1000; ++number) {
      for (float& grad : grads) grad = normal(random);
      take_adamw_step(layout, adamw_step({.learning_rate = 1e-4}, number), weights, grads, moments, table);
      const auto full = weights.loaded(layout, table);
      for (std::size_t i = 0; i < kCount; ++i) {
        const double value = value_of(weights.working[i], working);
        if (storage == WeightStorage::Kahan) {
          const auto* codes = reinterpret_cast<const std::uint16_t*>(weights.companion.data());
          ASSERT_EQ(full[i], float(value) + float(value_of(codes[i], working))) << number << " " << i;
        } else if (storage == WeightStorage::Fp32Master) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(full[i]), weights.companion[i]) << number << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
