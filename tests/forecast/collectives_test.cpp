#include "forecast/collectives.h"

#include <gtest/gtest.h>

namespace halfstep::forecast {
namespace {

TEST(Collectives, OneRankExchangesNothing) {
  EXPECT_EQ(collective_seconds(Collective::AllReduce, 1e9, 1, device_named("h100")), 0);
}

TEST(Collectives, LargeMessagesInANodeGoAtTheRateOfTheRing) {
  const Device& h100 = device_named("h100");
  // busbw, as nccl-tests defines it: bytes (n - 1) / n over seconds, twice for an all-reduce.
  const double bytes = 8e9, travelled = bytes * 7 / 8;
  EXPECT_NEAR(travelled / collective_seconds(Collective::AllGather, bytes, 8, h100), 365.6e9, 1e9);
  EXPECT_NEAR(2 * travelled / collective_seconds(Collective::AllReduce, bytes, 8, h100), 365.6e9, 1e9);
}

// Measured on four nodes of eight B200, github.com/stas00/ml-engineering, network, "Inter-node speed depends
// on intra-node speed": busbw of an all-reduce. The model knows no ramp between hops and bandwidth, so it is
// too quick for middle sizes: by a third at 256 MiB.
TEST(Collectives, AllReduceOverFourNodesIsNearWhatWasMeasured) {
  const Device& b200 = device_named("b200");
  const struct {
    double mebibytes, busbw, bound;
  } rows[] = {{16384, 381.8e9, 0.02}, {4096, 377.34e9, 0.02}, {1024, 361.99e9, 0.05}, {256, 229.09e9, 0.35}};
  for (const auto& row : rows) {
    const double bytes = row.mebibytes * 0x1p20, measured = 2 * bytes * 31 / 32 / row.busbw;
    const double forecast = collective_seconds(Collective::AllReduce, bytes, 32, b200);
    EXPECT_NEAR(forecast, measured, row.bound * measured) << row.mebibytes << " MiB";
  }
}

TEST(Collectives, SmallMessagesGrowWithTheRanksOnARingAndWithTheirLogarithmOnATree) {
  const Device& h100 = device_named("h100");
  const auto ratio = [&](Collective collective) {
    return collective_seconds(collective, 1024, 16384, h100) /
           collective_seconds(collective, 1024, 1024, h100);
  };
  EXPECT_GT(ratio(Collective::AllGather), 15);
  EXPECT_LT(ratio(Collective::AllReduce), 2);
}

}  // namespace
}  // namespace halfstep::forecast
