#include "words/numbers.h"

#include <gtest/gtest.h>

#include <limits>

namespace halfstep::cli {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(HumanNumbers, LossesHaveFourDecimalsUntilTheyAreHuge) {
  EXPECT_EQ(loss_text(3.21449), "3.2145");
  EXPECT_EQ(loss_text(10.8), "10.8000");
  EXPECT_EQ(loss_text(-0.04), "-0.0400");
  EXPECT_EQ(loss_text(123456), "1.23e+5");
}

TEST(HumanNumbers, LearningRatesHaveThreeSignificantDigits) {
  EXPECT_EQ(lr_text(3e-4), "3.00e-4");
  EXPECT_EQ(lr_text(0.1), "1.00e-1");
  EXPECT_EQ(lr_text(1.23456e-12), "1.23e-12");
  EXPECT_EQ(lr_text(0), "0");
}

TEST(HumanNumbers, RoundingThatCarriesKeepsThreeDigits) {
  EXPECT_EQ(short_text(0.9994), "0.999");
  EXPECT_EQ(short_text(0.9996), "1.00");
  EXPECT_EQ(short_text(9.994), "9.99");
  EXPECT_EQ(short_text(9.996), "10.0");
  EXPECT_EQ(short_text(99.96), "100");
  EXPECT_EQ(short_text(0.0099), "9.90e-3");
  EXPECT_EQ(short_text(12345), "1.23e+4");
}

TEST(HumanNumbers, RatesCarryASuffix) {
  EXPECT_EQ(si_text(812), "812");
  EXPECT_EQ(si_text(999.6), "1.00k");
  EXPECT_EQ(si_text(12345), "12.3k");
  EXPECT_EQ(si_text(999600), "1.00M");
  EXPECT_EQ(si_text(134515008), "135M");
  EXPECT_EQ(si_text(0), "0");
}

TEST(HumanNumbers, DurationsNameTheirTwoLargestUnits) {
  EXPECT_EQ(duration_text(0.2), "0s");
  EXPECT_EQ(duration_text(12.4), "12s");
  EXPECT_EQ(duration_text(59.6), "1m00s");
  EXPECT_EQ(duration_text(185), "3m05s");
  EXPECT_EQ(duration_text(3599.7), "1h00m");
  EXPECT_EQ(duration_text(3749), "1h02m");
  EXPECT_EQ(duration_text(2 * 86400 + 3 * 3600 + 59), "2d03h");
}

TEST(HumanNumbers, ShortTimesHaveThreeDigits) {
  EXPECT_EQ(fine_duration_text(0.045), "45.0ms");
  EXPECT_EQ(fine_duration_text(0.9996), "1.00s");
  EXPECT_EQ(fine_duration_text(3.2), "3.20s");
  EXPECT_EQ(fine_duration_text(9.999), "10s");
  EXPECT_EQ(fine_duration_text(185), "3m05s");
}

TEST(HumanNumbers, WholeNumbersAreGroupedByThousands) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(10741003), "10,741,003");
  EXPECT_EQ(with_commas(-999), "-999");
  EXPECT_EQ(with_commas(-1000), "-1,000");
}

TEST(HumanNumbers, SharesAndScalesAreShort) {
  EXPECT_EQ(percent_text(0.414), "41%");
  EXPECT_EQ(percent_text(0.001), "<1%");
  EXPECT_EQ(percent_text(0), "0%");
  EXPECT_EQ(loss_scale_text(65536), "65536");
  EXPECT_EQ(loss_scale_text(0.5), "0.500");
  EXPECT_EQ(loss_scale_text(0x1p40), "1.10e+12");
}

TEST(HumanNumbers, WhatIsNotFiniteSaysSo) {
  for (const auto text : {loss_text, lr_text, short_text, si_text, percent_text, loss_scale_text,
                          duration_text, fine_duration_text}) {
    EXPECT_EQ(text(kNaN), "NaN");
    EXPECT_EQ(text(kInf), "Inf");
    EXPECT_EQ(text(-kInf), "-Inf");
  }
}

}  // namespace
}  // namespace halfstep::cli
