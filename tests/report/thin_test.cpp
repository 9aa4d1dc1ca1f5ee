#include "report/thin.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace halfstep::report {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<Point> noise(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<Point> points;
  for (int64_t step = 1; step <= count; ++step) points.push_back({.step = step, .value = normal(random)});
  return points;
}

TEST(Thinned, LeavesFewPointsAsTheyAre) {
  const auto points = noise(100, 1);
  const auto columns = thinned(points, 100);
  ASSERT_EQ(columns.size(), 100u);
  for (size_t i = 0; i < columns.size(); ++i) {
    EXPECT_EQ(columns[i].first_step, points[i].step);
    EXPECT_EQ(columns[i].least.value, points[i].value);
    EXPECT_EQ(columns[i].mean, points[i].value);
  }
}

// Oracle: a search through all points of each column.
TEST(Thinned, EveryColumnHasTheExtremesOfItsPoints) {
  auto points = noise(12345, 2);
  points[777].value = kNaN;
  points[9000].value = 1e9;  // a spike of one step
  const auto columns = thinned(points, 600);
  EXPECT_LE(columns.size(), 600u);
  int64_t told = 0, not_finite = 0;
  double greatest = 0;
  for (const Column& column : columns) {
    told += column.finite + column.not_finite;
    not_finite += column.not_finite;
    greatest = std::max(greatest, column.greatest.value);
    double low = INFINITY, high = -INFINITY;
    for (const Point& point : points) {
      if (point.step < column.first_step || point.step > column.last_step || std::isnan(point.value))
        continue;
      low = std::min(low, point.value);
      high = std::max(high, point.value);
    }
    EXPECT_EQ(column.least.value, low);
    EXPECT_EQ(column.greatest.value, high);
  }
  EXPECT_EQ(told, 12345);
  EXPECT_EQ(not_finite, 1);
  EXPECT_EQ(greatest, 1e9);
}

TEST(Thinned, TakesStepsThatAreFarApartAndHuge) {
  const int64_t far = int64_t{1} << 61;
  std::vector<Point> points;
  for (int64_t i = 0; i < 1000; ++i) points.push_back({.step = far + i * (far / 2000), .value = 1.0});
  EXPECT_LE(thinned(points, 10).size(), 10u);
}

TEST(Smoothed, IsTheMeanOfTheWindowWhereThereIsOne) {
  const auto points = noise(200, 3);
  const auto smooth = smoothed(points, 21, 1000);
  ASSERT_EQ(smooth.size(), points.size());
  for (size_t i = 10; i + 10 < points.size(); ++i) {
    double sum = 0;
    for (size_t k = i - 10; k <= i + 10; ++k) sum += points[k].value;
    EXPECT_NEAR(smooth[i].value, sum / 21, 1e-12);
  }
}

TEST(Smoothed, AStraightLineStaysStraightToItsEnds) {
  std::vector<Point> points;
  for (int64_t step = 1; step <= 100; ++step)
    points.push_back({.step = step, .value = 5.0 - 0.03 * static_cast<double>(step)});
  points[40].value = kNaN;
  const auto smooth = smoothed(points, 21, 1000);
  for (size_t i = 0; i < points.size(); ++i) {
    if (i == 40)
      EXPECT_TRUE(std::isnan(smooth[i].value));
    else
      EXPECT_NEAR(smooth[i].value, points[i].value, 1e-12) << i;
  }
}

TEST(Smoothed, AHugeLossDoesNotDrownThoseBehindIt) {
  auto points = noise(500, 4);
  const auto before = smoothed(points, 11, 1000);
  points[100].value = 1e30;
  const auto after = smoothed(points, 11, 1000);
  for (size_t i = 106; i < points.size(); ++i) EXPECT_EQ(before[i].value, after[i].value);
}

}  // namespace
}  // namespace halfstep::report
