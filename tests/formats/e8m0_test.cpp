#include <gtest/gtest.h>
#include <halfstep/formats.h>

#include <bit>
#include <cmath>

namespace halfstep {
namespace {

/// The powers of two that E8M0 has, compared one by one in double.
int floor_by_search(float x) {
  int code = 0;
  while (code < 254 && std::ldexp(1.0, code + 1 - 127) <= x) ++code;
  return code;
}

int ceil_by_search(float x) {
  int code = 0;
  while (code < 254 && std::ldexp(1.0, code - 127) < x) ++code;
  return code;
}

TEST(E8m0, FloorAndCeilBracketEveryBinadeItsMidpointAndTheirNeighbours) {
  for (int exponent = -149; exponent <= 127; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    for (float centre : {power, 1.5f * power, 1.1f * power, 1.9f * power})
      for (float x : {std::nextafter(centre, 0.0f), centre, std::nextafter(centre, HUGE_VALF)}) {
        if (!std::isfinite(x)) continue;
        ASSERT_EQ(e8m0_floor(x), floor_by_search(x)) << std::hexfloat << x;
        ASSERT_EQ(e8m0_ceil(x), ceil_by_search(x)) << std::hexfloat << x;
      }
  }
}

TEST(E8m0, EveryFp32SubnormalRegionIsExact) {
  for (std::uint32_t bits = 1; bits < 0x01000000; bits += 251) {
    const float x = std::bit_cast<float>(bits);
    ASSERT_EQ(e8m0_floor(x), floor_by_search(x)) << bits;
    ASSERT_EQ(e8m0_ceil(x), ceil_by_search(x)) << bits;
  }
}

TEST(E8m0, EveryCodeIsItsOwnFloorAndCeil) {
  for (std::uint32_t code = 0; code < 255; ++code) {
    EXPECT_EQ(e8m0_floor(decode_float(code, Format::E8M0)), code);
    EXPECT_EQ(e8m0_ceil(decode_float(code, Format::E8M0)), code);
  }
}

TEST(E8m0, ZeroTakesTheSmallestScaleAndWhatCannotBeScaledIsNan) {
  for (float zero : {0.0f, -0.0f}) {
    EXPECT_EQ(e8m0_floor(zero), 0);
    EXPECT_EQ(e8m0_ceil(zero), 0);
  }
  for (float x : {-1.0f, -0x1p-149f, -HUGE_VALF, HUGE_VALF, NAN, -NAN, std::bit_cast<float>(0x7f800001u)}) {
    EXPECT_EQ(e8m0_floor(x), 255) << x;
    EXPECT_EQ(e8m0_ceil(x), 255) << x;
  }
}

TEST(E8m0, CeilStopsAtTheLargestScale) {
  EXPECT_EQ(e8m0_ceil(0x1p127f), 254);
  EXPECT_EQ(e8m0_ceil(0x1.000002p127f), 254);
  EXPECT_EQ(e8m0_ceil(0x1.fffffep127f), 254);
}

}  // namespace
}  // namespace halfstep
