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

// Of a random permutation of 8 things each of the 64 (thing, place) pairs has probability 1/8. Over 80,000
// epochs the chi-square statistic has 49 degrees of freedom: mean 49, deviation sqrt(98). Six deviations.
TEST(Permutation, PutsEachThingAnywhereEquallyOften) {
  constexpr int kEpochs = 80'000;
  int counts[8][8] = {};
  for (uint64_t epoch = 0; epoch < kEpochs; ++epoch)
    for (uint64_t i = 0; i < 8; ++i) ++counts[i][permuted(i, 8, 7, epoch)];
  double statistic = 0;
  constexpr double kExpected = kEpochs / 8.0;
  for (const auto& row : counts)
    for (const int count : row) statistic += (count - kExpected) * (count - kExpected) / kExpected;
  EXPECT_LT(statistic, 49 + 6 * std::sqrt(98.0));
}

}  // namespace
}  // namespace halfstep
