// A BF16 working copy and the 16 bits below it are the FP32 master, for every one that is a number and does
// not round to an Inf.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <thread>

#include "formats/spec_oracle.h"
#include "kernels/update.h"
#include "support/sanitized.h"

namespace halfstep {
namespace {

constexpr UpdateLayout kSplit{.working = Format::BF16, .weights = WeightStorage::SplitMaster};
constexpr std::size_t kChunk = 1 << 16;

/// What must come back: the word itself. NaNs come back without their payload, and masters that round up to
/// an Inf as that Inf: beside an Inf that somebody wrote, a remainder says nothing.
std::uint32_t expected_of(std::uint32_t fp32) {
  const std::uint32_t sign = fp32 & 0x80000000, magnitude = fp32 & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7fc00000;
  return magnitude >= 0x7f7f8000 ? sign | 0x7f800000 : fp32;
}

/// The FP32 words with these upper halves, there and back: how many come back otherwise, and how many are not
/// finite though their working copy is.
struct Found {
  std::size_t wrong = 0, hidden = 0;
};

void sweep(const KernelTable& table, std::uint32_t first_upper, std::uint32_t last_upper, Found& found) {
  std::vector<float> masters(kChunk), back(kChunk);
  std::vector<std::uint16_t> working(kChunk), remainder(kChunk);
  for (std::uint32_t upper = first_upper; upper < last_upper; ++upper) {
    for (std::uint32_t lower = 0; lower < kChunk; ++lower)
      masters[lower] = std::bit_cast<float>(upper << 16 | lower);
    store_weights(kSplit, masters.data(), working.data(), remainder.data(), kChunk, table);
    load_weights(kSplit, working.data(), remainder.data(), back.data(), kChunk, table);
    if ((upper & 0x7fff) < 0x7f7f) {  // all of them come back as they were
      found.wrong += std::memcmp(masters.data(), back.data(), kChunk * sizeof(float)) != 0;
      continue;
    }
    for (std::uint32_t lower = 0; lower < kChunk; ++lower) {
      found.wrong += std::bit_cast<std::uint32_t>(back[lower]) != expected_of(upper << 16 | lower);
      found.hidden += (upper & 0x7f80) == 0x7f80 && (working[lower] & 0x7f80) != 0x7f80;
    }
  }
}

TEST(SplitMaster, ReconstructsEveryFp32Pattern) {
  if (testing::kSanitized) GTEST_SKIP() << "half a minute, along a path that the next test takes as well";

  Found found[2];
  std::thread second([&] { sweep(kernels(), 0x8000, 0x10000, found[1]); });
  sweep(kernels(), 0, 0x8000, found[0]);
  second.join();
  EXPECT_EQ(found[0].wrong + found[1].wrong, 0u);
  EXPECT_EQ(found[0].hidden + found[1].hidden, 0u);
}

TEST(SplitMaster, EveryTableSplitsAndJoinsAlike) {
  for (const KernelTable* table : available_kernels()) {
    Found found;
    for (std::uint32_t upper :
         {0x0000, 0x0001, 0x007f, 0x3f80, 0x7f7f, 0x7f80, 0x7fff, 0x8000, 0xff7f, 0xffff})
      sweep(*table, upper, upper + 1, found);
    EXPECT_EQ(found.wrong, 0u) << table->isa;
    EXPECT_EQ(found.hidden, 0u) << table->isa;
  }
}

TEST(SplitMaster, TheWorkingCopyIsTheNearestBf16AndTiesGoAwayFromZero) {
  const oracle::Search search(Format::BF16);
  for (float x : oracle::edge_values(Format::BF16)) {
    if (!std::isfinite(x)) continue;
    std::uint16_t working, remainder;
    store_weights(kSplit, &x, &working, &remainder, 1);
    const oracle::Neighbours near = search.neighbours(std::abs(double(x)));
    const double middle = (near.below + near.above) / 2;
    const std::uint32_t expected = std::abs(double(x)) >= middle ? near.code_above : near.code_below;
    ASSERT_EQ(working & 0x7fff, expected) << std::hexfloat << x;
    ASSERT_EQ(working >> 15, std::signbit(x)) << std::hexfloat << x;
  }
}

TEST(KahanWeights, HoldBothHalvesOfAWeight) {
  // 8 bits in the working copy and 8 in the compensation, of either sign: 2^-9 of the weight, then 2^-9 of
  // that.
  const UpdateLayout layout{.working = Format::BF16, .weights = WeightStorage::Kahan};
  for (float x : {1.0f, 1.234567f, -3.1415926f, 1e-3f, 0.0f, 6.7e10f}) {
    std::uint16_t working, compensation;
    float back;
    store_weights(layout, &x, &working, &compensation, 1);
    load_weights(layout, &working, &compensation, &back, 1);
    EXPECT_LE(std::abs(double(back) - x), 0x1p-17 * std::abs(double(x))) << x;
  }
}

}  // namespace
}  // namespace halfstep
