#include "data/permutation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace halfstep {
namespace {

TEST(Permutation, TakesEveryPlaceOnce) {
  for (const uint64_t count : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4097, 100'000})
    for (const uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40}) {
      std::vector<int> times(count);
      for (uint64_t i = 0; i < count; ++i) ++times.at(permuted(i, count, 42, epoch));
      for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(times[i], 1) << i << " of " << count;
    }
}

TEST(Permutation, IsAnotherOneForEachSeedAndEpoch) {
  const auto order = [](uint64_t seed, uint64_t epoch) {
    std::vector<uint64_t> places;
    for (uint64_t i = 0; i < 1000; ++i) places.push_back(permuted(i, 1000, seed, epoch));
    return places;
  };
  EXPECT_NE(order(1, 0), order(2, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_NE(order(1, 0), order(uint64_t{1} << 32 | 1, 0));
  EXPECT_EQ(order(1, 0), order(1, 0));
}

// Of a random permutation of n things each of the n^2 (thing, place) pairs has probability 1/n. Over many
// epochs (n - 1) / n times the chi-square statistic of the pairs has (n - 1)^2 degrees of freedom: that is
// its mean, and twice that its variance. Six deviations, and a little for the skew of few degrees.
TEST(Permutation, PutsEachThingAnywhereEquallyOften) {
  constexpr int kEpochs = 40'000;
  for (const uint64_t n : {2, 3, 4, 5, 8, 20}) {
    std::vector<int> counts(n * n);
    for (uint64_t epoch = 0; epoch < kEpochs; ++epoch)
      for (uint64_t i = 0; i < n; ++i) ++counts[i * n + permuted(i, n, 7, epoch)];
    const double things = static_cast<double>(n), expected = kEpochs / things;
    double statistic = 0;
    for (const int count : counts) statistic += (count - expected) * (count - expected) / expected;
    const double degrees = (things - 1) * (things - 1);
    EXPECT_LT(statistic * (things - 1) / things, degrees + 6 * std::sqrt(2 * degrees) + 10) << n;
  }
}

}  // namespace
}  // namespace halfstep
