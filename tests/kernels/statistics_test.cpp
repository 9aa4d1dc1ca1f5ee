// Statistics of raw arrays: every table against casts by search, and against NumPy with ml_dtypes.
#include "kernels/statistics.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "formats/spec_oracle.h"
#include "kernels/optimizer_state.h"
#include "support/python.h"

namespace halfstep {
namespace {

using namespace testing_state;

constexpr Format kSources[] = {Format::FP32, Format::BF16, Format::FP16};
constexpr Format kTargets[] = {Format::BF16, Format::FP16, Format::E4M3, Format::E5M2, Format::E2M1};
constexpr std::size_t kEnoughForPairs = (std::size_t{1} << 19) + 77;

Array array_of(const std::vector<float>& values, Format format, std::size_t offset = 0) {
  Array array(bytes_of(format), values.size(), offset);
  for (std::size_t i = 0; i < values.size(); ++i) array.set(i, code_of(values[i], format));
  return array;
}

TensorStats stats_of(Array& array, Format format, const KernelTable& table) {
  TensorStats stats;
  add_statistics(format, array.at(0), array.count, stats, table);
  return stats;
}

TensorStats stats_of(const std::vector<float>& values, const KernelTable& table = kernels()) {
  TensorStats stats;
  add_statistics(Format::FP32, values.data(), values.size(), stats, table);
  return stats;
}

std::vector<float> random_words(std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(count);
  for (float& value : values) value = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
  return values;
}

/// Values at and around every limit of the formats, multiplied by 2^shift, with both signs.
std::vector<float> values_at_limits(int shift) {
  std::vector<float> values;
  for (Format format : kTargets) {
    const FormatTraits& t = traits(format);
    const double half_step = t.max * t.epsilon / 2;
    for (const double limit :
         {t.min_subnormal / 2, t.min_subnormal, t.min_normal, t.min_normal - t.min_subnormal / 2, t.max,
          t.max + half_step / 2, t.max + half_step, 464.0, 7.0, 61440.0, 65520.0}) {
      const auto x = static_cast<float>(std::ldexp(limit, shift));
      for (const float value : {x, std::nextafter(x, 0.0f), std::nextafter(x, HUGE_VALF)})
        values.insert(values.end(), {value, -value});
    }
  }
  return values;
}

/// The counts behind FormatShares, by a search among all values of the format.
struct Counts {
  std::int64_t zero = 0, subnormal = 0, saturated = 0, non_finite = 0;
};

Counts searched(const std::vector<float>& values, Format format, int power) {
  const oracle::Search search(format);
  const oracle::Spec& spec = oracle::spec_of(format);
  Counts counts;
  for (const float value : values) {
    if (!std::isfinite(value)) {
      ++counts.non_finite;
      continue;
    }
    const double magnitude = std::ldexp(std::fabs(double{value}), power);
    const oracle::Neighbours n = search.neighbours(magnitude);
    const double midpoint = (n.below + n.above) / 2;
    const bool up = magnitude > midpoint || (magnitude == midpoint && n.code_above % 2 == 0);
    const double rounded = up ? n.above : n.below;
    counts.zero += rounded == 0 && value != 0;
    counts.subnormal += rounded > 0 && rounded < spec.min_normal;
    counts.saturated += rounded > spec.max;
  }
  return counts;
}

int fitting_power(const std::vector<float>& values, Format format) {
  double amax = 0;
  for (const float value : values)
    if (std::isfinite(value)) amax = std::max(amax, std::fabs(double{value}));
  if (amax == 0) return 0;
  int power = 400;
  while (std::ldexp(amax, power) > oracle::spec_of(format).max) --power;
  return power;
}

void expect_shares(const FormatShares& shares, const Counts& counts, std::size_t count,
                   const std::string& what) {
  const auto of_all = [&](std::int64_t part) { return static_cast<double>(part) / double(count); };
  EXPECT_EQ(shares.zero, of_all(counts.zero)) << what;
  EXPECT_EQ(shares.subnormal, of_all(counts.subnormal)) << what;
  EXPECT_EQ(shares.saturated, of_all(counts.saturated)) << what;
  EXPECT_EQ(shares.non_finite, of_all(counts.non_finite)) << what;
}

/// For every table. `array` has the values in `source`.
void expect_exact(const std::vector<float>& values, Array& array, Format source, const std::string& what) {
  std::vector<TensorStats> of_tables;
  for (const KernelTable* table : available_kernels()) of_tables.push_back(stats_of(array, source, *table));
  for (Format format : kTargets) {
    const Counts counts = searched(values, format, 0);
    const Counts scaled = searched(values, format, fitting_power(values, format));
    for (std::size_t i = 0; i < of_tables.size(); ++i) {
      const std::string in = what + " in " + traits(format).name + ", " + available_kernels()[i]->isa;
      expect_shares(of_tables[i].in(format), counts, values.size(), in);
      expect_shares(of_tables[i].in_scaled(format), scaled, values.size(), in + ", scaled");
    }
  }
}

void expect_exact(const std::vector<float>& values, const std::string& what) {
  Array array = array_of(values, Format::FP32);
  expect_exact(values, array, Format::FP32, what);
}

TEST(Statistics, SharesAreThoseOfCastsAtEveryLimit) {
  for (int shift = -140; shift <= 110; shift += 5)
    expect_exact(values_at_limits(shift), "limits times 2^" + std::to_string(shift));
  for (Format format : kTargets) expect_exact(oracle::edge_values(format), "edges");
}

TEST(Statistics, SharesAreThoseOfCastsForEveryCode) {
  for (Format source : {Format::BF16, Format::FP16}) {
    Array codes(2, 65536, 1);
    std::vector<float> values(65536);
    for (std::uint32_t code = 0; code < 65536; ++code) {
      codes.set(code, code);
      values[code] = decode_float(code, source);
    }
    expect_exact(values, codes, source, traits(source).name);
  }
}

TEST(Statistics, SharesAreThoseOfCastsWithoutLargeValues) {
  // A small largest value moves the limits of in_scaled down, into FP32's subnormals in the end.
  for (const float largest : {0x1p-149f, 0x1.8p-140f, 0x1.fcp-120f, 0x1.fffffep-100f, 1e-20f, 1.0f, 300.0f}) {
    std::vector<float> values = random_words(20000, 3);
    for (int i = 0; i < 400; ++i) values.push_back(std::ldexp(1.9999f, -149 + i % 149));
    std::erase_if(values, [&](float value) { return !(std::fabs(value) <= largest); });
    values.push_back(largest);
    expect_exact(values, "at most " + std::to_string(largest));
  }
}

TEST(Statistics, CountsAreThoseOfTheBits) {
  const std::vector<float> values = random_words(100'003, 5);
  TensorStats expected;
  long double sum = 0, magnitudes = 0;
  for (const float value : values) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    ++expected.count;
    ++expected.exponents[bits >> 23 & 255];
    expected.nans += std::isnan(value);
    expected.infinities += std::isinf(value);
    expected.zeros += value == 0;
    if (!std::isfinite(value)) continue;
    expected.amax = std::max(expected.amax, std::fabs(value));
    sum += value;
    magnitudes += std::fabs(value);
  }
  for (const KernelTable* table : available_kernels()) {
    const TensorStats stats = stats_of(values, *table);
    EXPECT_EQ(stats.count, expected.count);
    EXPECT_EQ(stats.zeros, expected.zeros);
    EXPECT_EQ(stats.nans, expected.nans);
    EXPECT_EQ(stats.infinities, expected.infinities);
    EXPECT_EQ(stats.amax, expected.amax);
    EXPECT_EQ(stats.exponents, expected.exponents) << table->isa;
    // A lane adds count / 16 values, the tree four times, 2^-53 each.
    EXPECT_LE(std::abs(double(stats.sum - sum)), (values.size() / 16.0 + 5) * 0x1p-53 * double(magnitudes));
    EXPECT_EQ(stats.mean(), stats.sum / double(stats.finite()));
  }
}

TEST(Statistics, EveryTableGivesTheSameBits) {
  std::vector<std::vector<float>> cases;
  for (std::size_t count : {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 4095, 4096, 4097, 4160, 9000})
    for (Values kind : kValues) cases.push_back(random_values(kind, count, 7));
  for (Values kind : kValues) cases.push_back(random_values(kind, kEnoughForPairs, 8));
  cases.push_back(random_words(kEnoughForPairs, 9));
  cases.push_back(std::vector<float>(kEnoughForPairs, 0.0f));
  cases.push_back(std::vector<float>(kEnoughForPairs, -1.0f));
  // Zeros first, then values that move out of every window: the window has to follow, and more than once.
  std::vector<float> moving(2 * kEnoughForPairs);
  for (std::size_t i = 5000; i < moving.size(); ++i)
    moving[i] = std::ldexp(1 + float(i % 97) / 97, int(i / 300'000) * 80 - 120);
  cases.push_back(moving);
  for (Format source : kSources)
    for (std::size_t i = 0; i < cases.size(); ++i) {
      Array array = array_of(cases[i], source, i % 4);
      const TensorStats twin = stats_of(array, source, kScalarKernels);
      for (const KernelTable* table : available_kernels())
        ASSERT_EQ(stats_of(array, source, *table).packed(), twin.packed())
            << table->isa << " " << traits(source).name << " case " << i << ", " << cases[i].size();
    }
}

TEST(Statistics, OneUnusualValueAmongMany) {
  constexpr float kInf = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> ordinary = random_values(Values::Ordinary, 3 * 4096 + 70, 11);
  std::vector<float> unusual = {kInf, -kInf, kNan, 0.0f, -0.0f, 0x1p-149f, 0x1.8p-130f, 0x1.fffffep127f};
  // The window is 64 binades, and ends near 2^5 where the largest of the first block is near 4.
  for (const int exponent : {-100, -61, -60, -59, -58, -57, 3, 4, 5, 6, 100})
    for (const float fraction : {1.0f, 1.3f, 0x1.bffffep0f, 1.75f, 0x1.ffcp0f, 0x1.fffffep0f})
      unusual.push_back(std::ldexp(fraction, exponent));
  for (const float one : unusual)
    for (std::size_t at : {std::size_t{0}, std::size_t{63}, std::size_t{4095}, std::size_t{4096},
                           std::size_t{9000}, ordinary.size() - 1}) {
      std::vector<float> values = ordinary;
      values[at] = one;
      for (Format source : kSources) {
        Array array = array_of(values, source);
        const TensorStats twin = stats_of(array, source, kScalarKernels);
        for (const KernelTable* table : available_kernels())
          ASSERT_EQ(stats_of(array, source, *table).packed(), twin.packed())
              << table->isa << " " << traits(source).name << ": " << one << " at " << at;
      }
    }
}

TEST(Statistics, NothingIsReadOutsideOfTheArray) {
  for (const KernelTable* table : available_kernels())
    for (Format source : kSources)
      for (std::size_t count : {1, 63, 64, 100}) {
        // The guards around the array are small negative numbers in all formats, and would be counted.
        Array array = array_of(std::vector<float>(count, 2.0f), source, 1);
        const TensorStats stats = stats_of(array, source, *table);
        EXPECT_EQ(stats.exponents[128], std::int64_t(count)) << table->isa;
        EXPECT_EQ(stats.sum, 2.0 * double(count)) << table->isa;
      }
}

TEST(Statistics, FlushedSubnormalsAreCountedAllTheSame) {
  const std::vector<float> values = random_values(Values::Subnormal, 5000, 11);
  const TensorStats expected = stats_of(values);
  for (const KernelTable* table : available_kernels()) {
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);  // flush to zero, denormals are zero
    const TensorStats stats = stats_of(values, *table);
    const FormatShares shares = stats.in_scaled(Format::FP16);
    __builtin_ia32_ldmxcsr(before);
    EXPECT_EQ(stats.subnormals, expected.subnormals) << table->isa;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(stats.amax), std::bit_cast<std::uint32_t>(expected.amax));
    EXPECT_EQ(shares.zero, expected.in_scaled(Format::FP16).zero);
  }
}

TEST(Statistics, PartsMergeToTheWholeInAnyOrder) {
  std::vector<float> values = random_words(30'000, 13);
  std::vector<float> parts[3] = {{values.begin(), values.begin() + 17},
                                 {values.begin() + 17, values.begin() + 20'000},
                                 {values.begin() + 20'000, values.end()}};
  TensorStats whole = stats_of(values);
  int order[] = {0, 1, 2};
  do {
    TensorStats merged;
    for (int part : order) merged.merge(stats_of(parts[part]));
    merged.sum = whole.sum;  // whose last bits depend on the order
    EXPECT_EQ(merged.packed(), whole.packed());
  } while (std::next_permutation(std::begin(order), std::end(order)));
}

TEST(Statistics, PackedNumbersComeBackAndAreFew) {
  for (Values kind : kValues) {
    const TensorStats stats = stats_of(random_values(kind, 10'000, 17));
    const TensorStats back = TensorStats::unpacked(stats.packed());
    EXPECT_EQ(back.packed(), stats.packed());
    EXPECT_EQ(back.count, stats.count);
    EXPECT_EQ(back.exponents, stats.exponents);
    EXPECT_EQ(back.in(Format::FP16).subnormal, stats.in(Format::FP16).subnormal);
  }
  EXPECT_EQ(TensorStats::unpacked(TensorStats().packed()).count, 0);
  // 10,000 normal numbers span about 16 binades, of 7 numbers each.
  EXPECT_LT(stats_of(random_values(Values::Ordinary, 10'000, 17)).packed().size(), 200u);
}

TEST(Statistics, NumbersThatAreNoStatisticsAreRefused) {
  const std::vector<std::int64_t> good = stats_of({1.0f, 2.0f, 1e9f}).packed();
  EXPECT_THROW(TensorStats::unpacked({}), Error);
  EXPECT_THROW(TensorStats::unpacked(std::span(good).first(good.size() - 1)), Error);
  const auto refused = [&](std::size_t place, std::int64_t number) {
    std::vector<std::int64_t> numbers = good;
    numbers[place] = number;
    EXPECT_THROW(TensorStats::unpacked(numbers), Error) << place << " = " << number;
  };
  refused(0, -1);                                         // a negative count
  refused(2, std::numeric_limits<std::int64_t>::max());   // a count whose sums overflow
  refused(3, std::bit_cast<std::int64_t>(std::nan("")));  // a sum that no finite values have
  refused(4, 0x7f800000);                                 // an infinite amax
  refused(4, 0);                                          // values, and no largest one
  refused(4, std::bit_cast<std::int32_t>(3.0f));          // a largest one below others
  refused(6, 4);                                          // more saturated values than values
  refused(10, -150);                                      // a binade below FP32's
  refused(10, 127);                                       // the last binade above FP32's
  refused(12, 2);                                         // more powers of two than values
  // From the first binade on a sum that overflows: for every number of binades, all that wrap into a list.
  for (std::int64_t binades = 1; binades <= TensorStats::kBinades; ++binades)
    for (const std::int64_t short_of_all : {0, 1, 22, 127, 149, 275}) {
      std::vector<std::int64_t> numbers(11 + 7 * static_cast<std::size_t>(binades));
      numbers[10] = std::numeric_limits<std::int64_t>::max() - short_of_all;
      EXPECT_THROW(TensorStats::unpacked(numbers), Error) << binades << " from 2^63 - 1 - " << short_of_all;
      numbers[10] = std::numeric_limits<std::int64_t>::min() + short_of_all;
      EXPECT_THROW(TensorStats::unpacked(numbers), Error) << binades << " from -2^63 + " << short_of_all;
    }
}

TEST(Statistics, OtherFormatsAreRefused) {
  const float value = 1;
  TensorStats stats;
  EXPECT_THROW(add_statistics(Format::E4M3, &value, 1, stats), Error);
  EXPECT_THROW(stats.in(Format::TF32), Error);
  EXPECT_THROW(stats.in_scaled(Format::E8M0), Error);
  EXPECT_EQ(stats.in(Format::FP16).zero, 0) << "without values";
}

TEST(Statistics, InFp32OnlySubnormalsAreSubnormal) {
  const TensorStats stats = stats_of({0x1p-127f, -0x1.fffffcp-127f, 0x1p-126f, 0.0f, 3e38f, HUGE_VALF, 1, 1});
  const FormatShares shares = stats.in(Format::FP32);
  EXPECT_EQ(shares.subnormal, 0.25);
  EXPECT_EQ(shares.zero, 0);
  EXPECT_EQ(shares.saturated, 0);
  EXPECT_EQ(shares.non_finite, 0.125);
}

/// Values as a training step has them, and values that none should have.
std::vector<std::pair<std::string, std::vector<float>>> values_for_numpy() {
  std::vector<std::pair<std::string, std::vector<float>>> all = {{"random words", random_words(30'000, 19)}};
  for (int shift : {-100, -20, 0, 3}) {
    const std::vector<float> limits = values_at_limits(shift);
    all[0].second.insert(all[0].second.end(), limits.begin(), limits.end());
  }
  const std::vector<float> ordinary = random_values(Values::Ordinary, 30'000, 19);
  all.emplace_back("ordinary", ordinary);
  // What a loss scale is for, what BF16 and FP32 hold as subnormals, and what FP16 does not hold.
  for (const float scale : {1e-6f, 1e-30f, 1e-38f, 1e-41f, 1e5f, 1e30f}) {
    std::vector<float> scaled = ordinary;
    for (float& value : scaled) value *= scale;
    all.emplace_back("times " + std::to_string(std::log10(scale)), scaled);
  }
  // BF16 is scaled down where FP32 has values above its largest: both ends count.
  std::vector<float> wide = random_values(Values::Subnormal, 5'000, 23);
  for (int i = 0; i < 5'000; ++i) wide.push_back(std::ldexp(1 + float(i) / 5'000, -126 - i % 24));
  wide.push_back(std::numeric_limits<float>::max());
  all.emplace_back("from FP32's smallest to its largest", wide);
  all.emplace_back("zeros", std::vector<float>(100, -0.0f));
  all.emplace_back("none that is finite", std::vector<float>{HUGE_VALF, -HUGE_VALF, std::nanf("")});
  return all;
}

TEST(Statistics, AreThoseOfNumPyAndMlDtypesForEveryInputAndFormat) {
  struct Case {
    std::string what;
    Format source;
    Array array;
  };
  std::vector<Case> cases;
  for (Format source : kSources)
    for (const auto& [what, values] : values_for_numpy())
      cases.push_back({std::string(traits(source).name) + ", " + what, source, array_of(values, source)});
  for (Format source : {Format::BF16, Format::FP16}) {
    Array codes(2, 65536, 0);
    for (std::uint32_t code = 0; code < 65536; ++code) codes.set(code, code);
    cases.push_back({std::string(traits(source).name) + ", every code", source, codes});
  }
  nlohmann::json asked = nlohmann::json::array();
  for (const Case& each : cases) {
    std::vector<std::uint32_t> words(each.array.count);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = each.array.code(i);
    asked.push_back({{"format", traits(each.source).name}, {"bits", words}});
  }
  const nlohmann::json answers =
      halfstep::testing::ask_python("tests/kernels/statistics_oracle.py", {{"many", asked}});
  ASSERT_EQ(answers.size(), cases.size());
  std::size_t compared = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Case& each = cases[i];
    const nlohmann::json& theirs = answers[i];
    for (const KernelTable* table : available_kernels()) {
      const TensorStats stats = stats_of(each.array, each.source, *table);
      const std::string what = each.what + ", " + table->isa;
      EXPECT_EQ(stats.count, theirs["count"]) << what;
      EXPECT_EQ(stats.zeros, theirs["zeros"]) << what;
      EXPECT_EQ(stats.nans, theirs["nans"]) << what;
      EXPECT_EQ(stats.infinities, theirs["infinities"]) << what;
      EXPECT_EQ(std::bit_cast<std::uint32_t>(stats.amax), theirs["amax"]) << what;
      EXPECT_EQ(stats.exponents, (theirs["exponents"].get<std::array<std::int64_t, 256>>())) << what;
      // A lane adds count / 16 values, the tree four times, 2^-53 each.
      EXPECT_LE(std::abs(stats.sum - theirs["sum"].get<double>()),
                (double(each.array.count) / 16 + 5) * 0x1p-53 * theirs["magnitudes"].get<double>())
          << what;
      const auto counts = [](const nlohmann::json& of) {
        return Counts{of["zero"], of["subnormal"], of["saturated"], of["non_finite"]};
      };
      for (Format format :
           {Format::FP32, Format::BF16, Format::FP16, Format::E4M3, Format::E5M2, Format::E2M1}) {
        const char* name = traits(format).name;
        expect_shares(stats.in(format), counts(theirs["in"][name]), each.array.count, what + " in " + name);
        expect_shares(stats.in_scaled(format), counts(theirs["in_scaled"][name]), each.array.count,
                      what + " in " + name + ", scaled");
        compared += 2;
      }
    }
  }
  RecordProperty("compared", static_cast<int>(compared));
}

}  // namespace
}  // namespace halfstep
