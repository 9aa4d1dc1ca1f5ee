#include "report/plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

namespace halfstep::report {
namespace {

void expect_good(const Axis& axis, double low, double high) {
  EXPECT_LE(axis.low, low);
  EXPECT_GE(axis.high, high);
  EXPECT_GE(axis.ticks.size(), 2u) << low << " to " << high;
  EXPECT_LE(axis.ticks.size(), 9u) << low << " to " << high;
  std::set<std::string> labels;
  for (const Tick& tick : axis.ticks) {
    EXPECT_GE(axis.place(tick.value), -1e-9);
    EXPECT_LE(axis.place(tick.value), 1 + 1e-9);
    EXPECT_TRUE(labels.insert(tick.label).second) << tick.label << " stands twice: " << low << " to " << high;
  }
}

TEST(Axis, HoldsItsValuesWithTicksThatDiffer) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(-6, 8), share(0, 1);
  for (int i = 0; i < 2000; ++i) {
    const double size = std::pow(10.0, exponent(random)), low = size * share(random),
                 high = low + size * share(random);
    if (high - low < 1e-4 * high) continue;
    SCOPED_TRACE(::testing::Message() << low << " to " << high);
    expect_good(axis_around(AxisKind::Linear, low, high, false), low, high);
    expect_good(axis_around(AxisKind::Linear, low, high, true), low, high);
    if (low > 0) expect_good(axis_around(AxisKind::Log10, low, high, false), low, high);
  }
}

TEST(Axis, LabelsAreTheValuesOfTheirTicks) {
  const Axis axis = axis_around(AxisKind::Linear, 1.12, 5.6, false);
  ASSERT_FALSE(axis.ticks.empty());
  for (const Tick& tick : axis.ticks) EXPECT_NEAR(std::stod(tick.label), tick.value, 1e-12) << tick.label;
  EXPECT_EQ(axis_around(AxisKind::Linear, 0, 25000, true).ticks.back().label, "25k");
}

TEST(Axis, AConstantHasRoomAroundIt) {
  for (const double value : {0.0, 3e-4, 41.0, -2.0})
    for (const bool from_zero : {false, true}) {
      const Axis axis = axis_around(AxisKind::Linear, value, value, from_zero);
      EXPECT_LT(axis.low, axis.high);
      EXPECT_GE(axis.place(value), 0.0);
      EXPECT_LE(axis.place(value), 1.0);
    }
}

TEST(Axis, PowersOfTwoAreWrittenAsPowers) {
  const Axis axis = axis_around(AxisKind::Log2, 8192, 65536, false);
  ASSERT_EQ(axis.ticks.size(), 4u);
  EXPECT_EQ(axis.ticks.front().label, "2<sup>13</sup>");
  EXPECT_EQ(axis.ticks.back().label, "2<sup>16</sup>");
  EXPECT_NEAR(axis.place(16384) - axis.place(8192), axis.place(65536) - axis.place(32768), 1e-12);
  expect_good(axis_around(AxisKind::Log2, 0x1p-24, 0x1p126, false), 0x1p-24, 0x1p126);
}

TEST(Axis, ALogarithmicOneHoldsNoZeroAndNoNaN) {
  const Axis axis = axis_around(AxisKind::Log10, 0.1, 10, false);
  EXPECT_FALSE(axis.holds(0));
  EXPECT_FALSE(axis.holds(-1));
  EXPECT_FALSE(axis.holds(std::nan("")));
  EXPECT_TRUE(axis.holds(1e-9));
  EXPECT_DOUBLE_EQ(axis.place(axis.low), 0.0);
  EXPECT_DOUBLE_EQ(axis.place(axis.high), 1.0);
}

TEST(Axis, OneStepIsEnough) {
  const Axis axis = axis_of_steps(7, 7);
  EXPECT_DOUBLE_EQ(axis.place(7), 0.0);
  EXPECT_EQ(axis.ticks.front().label, "7");
}

}  // namespace
}  // namespace halfstep::report
