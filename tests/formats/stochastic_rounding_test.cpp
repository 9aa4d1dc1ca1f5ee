// Is stochastic rounding fair? Every gap of E4M3 and E5M2, sampled gaps of BF16, 16 fractions each: only the
// two neighbours may come out, and the upper one as often as the fraction says.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "formats/philox.h"
#include "formats/reference_cast.h"
#include "formats/spec_oracle.h"
#include "kernels/cast.h"

namespace halfstep {
namespace {

/// A value inside the gap above `lower_code`, at this fraction of it.
struct Case {
  Format format;
  std::uint32_t lower_code, upper_code;
  float value;
  double fraction;
};

constexpr int kFractions = 16;

/// One fraction in each sixteenth, an odd multiple of 2^-16: exact in FP32 in every gap, so that the expected
/// probability is exact too, and all 16 bits of the comparison take part. None is within 1% of 0 or 1.
double fraction_in_sixteenth(int sixteenth, std::uint32_t salt) {
  const std::uint32_t low_bits = 1025 + 2 * (salt % 1024);
  return (4096 * sixteenth + low_bits) * 0x1p-16;
}

void add_gap(std::vector<Case>& cases, Format format, std::uint32_t code) {
  const oracle::Spec& spec = oracle::spec_of(format);
  const double below = oracle::value_of_code(spec, code), above = oracle::value_of_code(spec, code + 1);
  const std::uint32_t sign_bit = 1u << (spec.bits - 1);
  for (int k = 0; k < kFractions; ++k) {
    const double fraction = fraction_in_sixteenth(k, 977 * code + 131 * k);
    const auto value = static_cast<float>(below + fraction * (above - below));
    cases.push_back({format, code, code + 1, value, fraction});
    cases.push_back({format, code | sign_bit, (code + 1) | sign_bit, -value, fraction});
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (Format format : {Format::E4M3, Format::E5M2})
    for (std::uint32_t code = 0; code < traits(format).max_code; ++code) add_gap(cases, format, code);
  // BF16: the first and last subnormal and normal gaps, one beside 1, and random ones.
  std::vector<std::uint32_t> bf16_codes = {0,    1,      0x7e,   0x7f,
                                           0x80, 0x3f7f, 0x3f80, traits(Format::BF16).max_code - 1};
  std::mt19937 random(5);
  while (bf16_codes.size() < 32)
    bf16_codes.push_back(static_cast<std::uint32_t>(random()) % traits(Format::BF16).max_code);
  for (std::uint32_t code : bf16_codes) add_gap(cases, Format::BF16, code);
  return cases;
}

// The check, and how many draws it needs. Both bounds are Chernoff's, so they hold for every n without a
// normal approximation, and the union over `tests` checks fails a fair rounding with probability below
// kFalseAlarm.
//
//   P(the observed share of ups is as far from p as this, or farther) <= 2 exp(-n KL(observed || p))
//
// Reject when that is below kFalseAlarm / tests. Since KL(p + d || p) >= 2 d^2, all d from
// sqrt(ln(2 tests / kFalseAlarm) / 2n) on are rejected. A rounding whose probability is off by kBias lands
// within sqrt(ln(2 / kMiss) / 2n) of p + kBias, but for a chance of kMiss. The two add up to kBias at the n
// below.
constexpr double kFalseAlarm = 1e-6, kMiss = 1e-3, kBias = 0.01;

std::size_t draws_needed(std::size_t tests) {
  const double reach = std::sqrt(std::log(2 * tests / kFalseAlarm)) + std::sqrt(std::log(2 / kMiss));
  return static_cast<std::size_t>(std::ceil(reach * reach / (2 * kBias * kBias)));
}

double divergence(double q, double p) {
  const auto term = [](double a, double b) { return a == 0 ? 0 : a * std::log(a / b); };
  return term(q, p) + term(1 - q, 1 - p);
}

bool is_fair(std::size_t ups, std::size_t draws, double p, std::size_t tests) {
  const double share = static_cast<double>(ups) / static_cast<double>(draws);
  const double log_chance = std::log(2.0) - static_cast<double>(draws) * divergence(share, p);
  return log_chance >= std::log(kFalseAlarm / static_cast<double>(tests));
}

template <typename CodeType>
void expect_fair(const Case& c, std::uint32_t number, std::size_t draws, std::size_t tests) {
  const CastMode mode{.rounding = Rounding::Stochastic, .overflow = Overflow::NonFinite};
  static thread_local std::vector<float> values;
  static thread_local std::vector<CodeType> codes;
  values.assign(draws, c.value);
  codes.resize(draws);
  cast_stochastic(values, c.format, mode, {{.seed = 2026, .tensor = number, .step = 1}, 0}, codes.data());
  const auto ups = static_cast<std::size_t>(std::count(codes.begin(), codes.end(), CodeType(c.upper_code)));
  const auto downs = static_cast<std::size_t>(std::count(codes.begin(), codes.end(), CodeType(c.lower_code)));
  ASSERT_EQ(ups + downs, draws) << traits(c.format).name << " " << c.value
                                << ": something else than its neighbours";
  ASSERT_TRUE(is_fair(ups, draws, c.fraction, tests))
      << traits(c.format).name << " " << c.value << ": up " << ups << " times of " << draws << ", expected "
      << c.fraction * static_cast<double>(draws);
}

TEST(StochasticRounding, GoesUpAsOftenAsTheFractionSaysInEveryGap) {
  const std::vector<Case> cases = all_cases();
  ASSERT_EQ(cases.size(), (126u + 123u + 32u) * 2 * kFractions) << "gaps of E4M3, E5M2, BF16, both signs";
  const std::size_t draws = draws_needed(cases.size());
  RecordProperty("cases", static_cast<int>(cases.size()));
  RecordProperty("draws_per_case", static_cast<int>(draws));
  std::uint32_t number = 0;
  for (const Case& c : cases) {
    c.format == Format::BF16 ? expect_fair<std::uint16_t>(c, number, draws, cases.size())
                             : expect_fair<std::uint8_t>(c, number, draws, cases.size());
    if (HasFatalFailure()) return;
    ++number;
  }
}

// The proof that the test above can fail: the same number of draws from a generator that is 1% off.
TEST(StochasticRounding, ABiasOfOnePercentWouldBeSeenAtEveryFractionAndInEitherDirection) {
  const std::size_t tests = all_cases().size(), draws = draws_needed(tests);
  const CastMode mode{.rounding = Rounding::Stochastic};
  const auto offset = static_cast<std::int64_t>(kBias * 0x1p32);
  for (int k = 0; k < kFractions; ++k)
    for (std::int64_t direction : {-1, 1}) {
      const double fraction = fraction_in_sixteenth(k, k);
      const auto value = static_cast<float>(1 + fraction * traits(Format::E4M3).epsilon);
      const std::uint32_t lower = encode_float(1, Format::E4M3);
      std::size_t ups = 0;
      for (std::size_t i = 0; i < draws; ++i) {
        const std::int64_t fair = random_bits({.seed = 1, .tensor = std::uint32_t(k), .step = 2}, i);
        const std::int64_t biased = std::clamp<std::int64_t>(fair + direction * offset, 0, 0xffffffff);
        ups += reference_cast<Format::E4M3>(std::bit_cast<std::uint32_t>(value), mode,
                                            static_cast<std::uint32_t>(biased)) != lower;
      }
      EXPECT_FALSE(is_fair(ups, draws, fraction, tests))
          << "fraction " << fraction << " direction " << direction;
    }
}

TEST(StochasticRounding, LeavesRepresentableValuesAlone) {
  const CastMode mode{.rounding = Rounding::Stochastic, .overflow = Overflow::NonFinite};
  for (Format format : {Format::E4M3, Format::E5M2, Format::E4M3FNUZ, Format::E5M2FNUZ, Format::E2M1})
    for (std::uint32_t code = 0; code < 1u << traits(format).bits; ++code) {
      const std::vector<float> values(1000, decode_float(code, format));
      if (!std::isfinite(values[0])) continue;
      std::vector<std::uint8_t> codes(values.size());
      cast_stochastic(values, format, mode, {{.seed = 3, .tensor = code, .step = 0}, 0}, codes.data());
      ASSERT_TRUE(std::all_of(codes.begin(), codes.end(), [&](auto c) { return c == code; })) << code;
    }
}

TEST(StochasticRounding, SameKeySameBitsAnotherKeyOtherBitsInEveryTable) {
  std::vector<float> values(100003);
  std::mt19937 random(9);
  for (float& x : values) x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  const CastMode mode{.rounding = Rounding::Stochastic};
  const auto cast_with = [&](StochasticKey key, const KernelTable& table) {
    std::vector<std::uint16_t> codes(values.size());
    cast_stochastic(values, Format::BF16, mode, {key, 12345}, codes.data(), table);
    return codes;
  };
  const auto first = cast_with({42, 1, 100}, kernels());
  for (const KernelTable* table : available_kernels())
    EXPECT_EQ(cast_with({42, 1, 100}, *table), first) << table->isa;
  for (StochasticKey other :
       {StochasticKey{43, 1, 100}, StochasticKey{42, 2, 100}, StochasticKey{42, 1, 101}})
    EXPECT_NE(cast_with(other, kernels()), first);
}

TEST(StochasticRounding, AboveMaxTheUpperNeighbourIsTheOverflow) {
  // Halfway from 448 to 480, which E4M3 would have next.
  const std::vector<float> values(10000, 464.0f);
  std::vector<std::uint8_t> codes(values.size());
  CastMode mode{.rounding = Rounding::Stochastic, .overflow = Overflow::NonFinite};
  cast_stochastic(values, Format::E4M3, mode, {}, codes.data());
  const auto nans = std::count(codes.begin(), codes.end(), 0x7f);
  EXPECT_EQ(nans + std::count(codes.begin(), codes.end(), 0x7e), 10000);
  EXPECT_NEAR(static_cast<double>(nans), 5000, 6 * 50) << "six standard deviations of a fair coin";
  mode.overflow = Overflow::Saturate;
  cast_stochastic(values, Format::E4M3, mode, {}, codes.data());
  EXPECT_EQ(std::count(codes.begin(), codes.end(), 0x7e), 10000);
}

}  // namespace
}  // namespace halfstep
