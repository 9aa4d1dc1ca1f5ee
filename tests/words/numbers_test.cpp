#include "words/numbers.h"

#include <gtest/gtest.h>

#include <limits>

namespace halfstep::report {
namespace {

TEST(Numbers, KeepTheirDigits) {
  EXPECT_EQ(digits(1.62), "1.620");
  EXPECT_EQ(digits(10.806), "10.81");
  EXPECT_EQ(digits(9.99996), "10.00");
  EXPECT_EQ(digits(12345.6), "12,346");
  EXPECT_EQ(digits(0.0003), "0.0003000");
  EXPECT_EQ(digits(1.5e-9), "1.500e-09");
  EXPECT_EQ(digits(1e30), "1.000e+30");
  EXPECT_EQ(digits(-0.5), "-0.5000");
  EXPECT_EQ(digits(0), "0.000");
  EXPECT_EQ(digits(std::numeric_limits<double>::quiet_NaN()), "NaN");
  EXPECT_EQ(digits(-std::numeric_limits<double>::infinity()), "-Inf");
  EXPECT_EQ(short_digits(1.62), "1.62");
  EXPECT_EQ(short_digits(2.0), "2");
  EXPECT_EQ(short_digits(100.0), "100");
  EXPECT_EQ(short_digits(1.5e-9), "1.5e-09");
}

TEST(Numbers, HaveUnitsThatAPersonReads) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_suffix(999.7), "1k");
  EXPECT_EQ(with_suffix(12345), "12.3k");
  EXPECT_EQ(with_suffix(4.1e6), "4.1M");
  EXPECT_EQ(bytes_text(834e3), "834 kB");
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(duration(1e308), "1.00e+308 s");
  EXPECT_EQ(duration(7384), "2 h 03 min");
  EXPECT_EQ(duration(3599.9), "1 h 00 min");
  EXPECT_EQ(duration(200), "3 min 20 s");
  EXPECT_EQ(duration(12.34), "12.3 s");
  EXPECT_EQ(duration(0.0045), "4.5 ms");
  EXPECT_EQ(duration(0.000012), "12 µs");
  EXPECT_EQ(percent(0.021), "2.1%");
  EXPECT_EQ(percent(0.00001), "<0.01%");
  EXPECT_EQ(percent(0), "0%");
  EXPECT_EQ(counted(1, "step"), "1 step");
  EXPECT_EQ(counted(1200, "step"), "1,200 steps");
}

TEST(Numbers, AreRoundedToTheirUncertainty) {
  EXPECT_EQ(with_uncertainty(2.0123, 0.0519), "+2.012 ± 0.052");
  EXPECT_EQ(with_uncertainty(-0.55, 0.95), "−0.55 ± 0.95");
  EXPECT_EQ(with_uncertainty(0.0001, 0.1), "0.00 ± 0.10");
  EXPECT_EQ(with_uncertainty(12, 140), "+12 ± 140");
}

}  // namespace
}  // namespace halfstep::report
