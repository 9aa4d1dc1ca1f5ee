#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "formats/spec_oracle.h"

namespace halfstep {
namespace {

static_assert(traits(Format::BF16).epsilon == 0x1p-7);
static_assert(traits(Format::E4M3).max == 448);

TEST(Traits, AreThePublishedNumbers) {
  for (const oracle::Spec& spec : oracle::specs()) {
    const FormatTraits& t = traits(spec.format);
    SCOPED_TRACE(spec.name);
    EXPECT_EQ(t.name, spec.name);
    EXPECT_EQ(t.bits, spec.bits);
    EXPECT_EQ(t.exponent_bits, spec.exponent_bits);
    EXPECT_EQ(t.mantissa_bits, spec.mantissa_bits);
    EXPECT_EQ(t.bias, spec.bias);
    EXPECT_EQ(t.max, spec.max);
    EXPECT_EQ(t.min_normal, spec.min_normal);
    EXPECT_EQ(t.min_subnormal, spec.min_subnormal);
    EXPECT_EQ(t.epsilon, spec.epsilon);
    EXPECT_EQ(t.has_signed_zero, spec.signed_zero);
    EXPECT_EQ(t.has_inf, !spec.inf_codes.empty());
    EXPECT_EQ(t.inf_code, t.has_inf ? spec.inf_codes[0] : 0);
    EXPECT_EQ(t.has_nan, spec.first_nan <= spec.last_nan);
    EXPECT_EQ(oracle::is_nan_code(spec, t.nan_code), t.has_nan);
    const int nan_codes =
        static_cast<int>(spec.last_nan - spec.first_nan + 1) * (spec.nans_of_both_signs ? 2 : 1);
    EXPECT_EQ(t.nan_code_count, nan_codes);
    EXPECT_EQ(oracle::value_of_code(spec, t.max_code), spec.max);
  }
}

/// Every code where there are at most 16 bits, else every 4099th.
std::vector<std::uint32_t> codes_of(const oracle::Spec& spec) {
  const std::uint64_t count = std::uint64_t{1} << spec.bits, stride = spec.bits == 32 ? 4099 : 1;
  std::vector<std::uint32_t> codes;
  for (std::uint64_t code = 0; code < count; code += stride)
    codes.push_back(static_cast<std::uint32_t>(code));
  return codes;
}

TEST(Decode, GivesEveryCodeItsValue) {
  for (const oracle::Spec& spec : oracle::specs()) {
    int nan_count = 0;
    for (std::uint32_t code : codes_of(spec)) {
      const float decoded = decode_float(code, spec.format);
      if (oracle::is_nan_code(spec, code)) {
        ++nan_count;
        const bool negative = spec.nans_of_both_signs && code >> (spec.bits - 1);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(decoded), negative ? 0xffc00000 : 0x7fc00000)
            << spec.name << code;
      } else if (std::count(spec.inf_codes.begin(), spec.inf_codes.end(), code)) {
        ASSERT_EQ(decoded, code == spec.inf_codes[0] ? HUGE_VALF : -HUGE_VALF) << spec.name << code;
      } else if (spec.unused_low_bits == 0 || code % (1u << spec.unused_low_bits) == 0) {
        const double value = oracle::value_of_code(spec, code);
        ASSERT_EQ(decoded, value) << spec.name << " code " << code;
        ASSERT_EQ(std::signbit(decoded), std::signbit(value)) << spec.name << " code " << code;
      }
    }
    if (spec.bits <= 16) {
      EXPECT_EQ(nan_count, traits(spec.format).nan_code_count) << spec.name;
    }
  }
}

TEST(Decode, RefusesBitsThatTheFormatDoesNotHave) {
  EXPECT_THROW((void)decode_float(0x100, Format::E4M3), Error);
  EXPECT_THROW((void)decode_float(0x10, Format::E2M1), Error);
  EXPECT_NO_THROW((void)decode_float(0xffffffff, Format::FP32));
}

}  // namespace
}  // namespace halfstep
