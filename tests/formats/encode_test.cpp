#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <xmmintrin.h>

#include <bit>
#include <cmath>

#include "formats/reference_cast.h"
#include "formats/spec_oracle.h"

namespace halfstep {
namespace {

constexpr Format kSearchable[] = {Format::BF16,     Format::FP16,     Format::E4M3, Format::E5M2,
                                  Format::E4M3FNUZ, Format::E5M2FNUZ, Format::E2M1};
constexpr Overflow kOverflows[] = {Overflow::Saturate, Overflow::NonFinite};
constexpr InfInput kInfInputs[] = {InfInput::Saturate, InfInput::NonFinite};

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

// Oracle: search all values of the format, decoded from its definition.
TEST(Encode, PicksTheNeighbourThatTheRoundingAsksForInEveryFormatAndMode) {
  for (Format format : kSearchable) {
    const oracle::Search search(format);
    const std::vector<float> values = oracle::edge_values(format);
    for (Rounding rounding : {Rounding::NearestEven, Rounding::TowardZero})
      for (Overflow overflow : kOverflows)
        for (InfInput inf_input : kInfInputs) {
          const CastMode mode{rounding, overflow, inf_input};
          for (float x : values)
            ASSERT_EQ(encode_float(x, format, mode), search.cast(x, mode))
                << traits(format).name << " of " << std::hexfloat << x << " (0x" << std::hex << bits_of(x)
                << ")"
                << " rounding " << int(rounding) << " overflow " << int(overflow) << " inf "
                << int(inf_input);
        }
  }
}

// Oracle: FP32 arithmetic on the container. Adding and subtracting 3 * 2^(e+12) rounds to 2^(e-10) in
// hardware's round to nearest even, for a value of binade e.
TEST(Encode, RoundsTf32InItsFp32Container) {
  for (float x : oracle::edge_values(Format::TF32)) {
    const double magnitude = std::fabs(static_cast<double>(x));
    if (!std::isfinite(x) || magnitude >= 0x1.ffep127) continue;
    const int binade = magnitude < 0x1p-126 ? -126 : std::ilogb(magnitude);
    const double grid = std::ldexp(1.0, binade - 10);
    const auto nearest = static_cast<float>(std::nearbyint(x / grid) * grid);
    ASSERT_EQ(encode_float(x, Format::TF32), bits_of(nearest) | (bits_of(x) & 0x80000000))
        << std::hexfloat << x;
    const auto toward_zero = static_cast<float>(std::trunc(x / grid) * grid);
    ASSERT_EQ(encode_float(x, Format::TF32, {.rounding = Rounding::TowardZero}),
              bits_of(toward_zero) | (bits_of(x) & 0x80000000))
        << std::hexfloat << x;
  }
  const CastMode to_inf{.overflow = Overflow::NonFinite};
  EXPECT_EQ(encode_float(0x1.ffep127f, Format::TF32), 0x7f7fe000u) << "saturates at max";
  EXPECT_EQ(encode_float(0x1.ffep127f, Format::TF32, to_inf), 0x7f800000u) << "a tie that rounds to 2^128";
  EXPECT_EQ(encode_float(0x1.ffdffep127f, Format::TF32, to_inf), 0x7f7fe000u) << "just below the tie";
  EXPECT_EQ(encode_float(-HUGE_VALF, Format::TF32), 0xff800000u);
}

TEST(Encode, LeavesFp32AsItIsButForNanPayloads) {
  for (float x : oracle::edge_values(Format::FP32)) {
    const std::uint32_t expected = std::isnan(x) ? 0x7fc00000 | (bits_of(x) & 0x80000000) : bits_of(x);
    ASSERT_EQ(encode_float(x, Format::FP32), expected);
  }
}

TEST(Encode, HoldsALargeValueAtMaxAndLetsAnInfBeSeenUnlessToldOtherwise) {
  EXPECT_EQ(encode_float(1e30f, Format::E4M3), 0x7eu) << "448";
  EXPECT_EQ(encode_float(HUGE_VALF, Format::E4M3), 0x7fu) << "NaN";
  EXPECT_EQ(encode_float(HUGE_VALF, Format::E5M2), 0x7cu) << "Inf";
  EXPECT_EQ(encode_float(HUGE_VALF, Format::E4M3, {.inf_input = InfInput::Saturate}), 0x7eu)
      << "as LibTorch 2.13";
}

TEST(Encode, RoundsBeforeItLooksForOverflow) {
  const CastMode mode{.overflow = Overflow::NonFinite};
  EXPECT_EQ(encode_float(464, Format::E4M3, mode), 0x7eu) << "a tie, and 448 is even";
  EXPECT_EQ(encode_float(464.00003f, Format::E4M3, mode), 0x7fu);
  EXPECT_EQ(encode_float(61439.996f, Format::E5M2, mode), 0x7bu);
  EXPECT_EQ(encode_float(61440, Format::E5M2, mode), 0x7cu);
  EXPECT_EQ(
      encode_float(1e30f, Format::E5M2, {.rounding = Rounding::TowardZero, .overflow = Overflow::NonFinite}),
      0x7bu)
      << "toward zero nothing finite overflows";
}

TEST(Encode, TurnsANanIntoPlusSixInE2m1WhichHasNone) {
  for (std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u})
    EXPECT_EQ(decode_float(encode_float(std::bit_cast<float>(nan), Format::E2M1), Format::E2M1), 6.0f);
}

TEST(Encode, EveryFiniteValueOfAFormatKeepsItsCode) {
  for (Format format : kSearchable) {
    const oracle::Spec& spec = oracle::spec_of(format);
    for (std::uint32_t code = 0; code < 1u << spec.bits; ++code) {
      const float value = decode_float(code, format);
      if (!std::isfinite(value)) continue;
      ASSERT_EQ(encode_float(value, format), code) << spec.name;
      ASSERT_EQ(encode_float(value, format, {.rounding = Rounding::TowardZero}), code) << spec.name;
    }
  }
}

// Up for exactly floor(fraction * 2^32) of the 2^32 random words: the last word that stays down, and the
// next.
TEST(StochasticEncode, TurnsAtTheRandomWordThatTheFractionSays) {
  const CastMode mode{.rounding = Rounding::Stochastic, .overflow = Overflow::NonFinite};
  const oracle::Search e4m3(Format::E4M3);
  for (float x : oracle::edge_values(Format::E4M3)) {
    if (!std::isfinite(x)) continue;
    const oracle::Neighbours n = e4m3.neighbours(std::fabs(static_cast<double>(x)));
    const double gap = n.above - n.below;
    const double fraction = gap > 0 ? (std::fabs(static_cast<double>(x)) - n.below) / gap : 0;
    const auto ups = static_cast<std::uint64_t>(std::ldexp(std::min(fraction, 1.0), 32));
    constexpr std::uint64_t kWords = std::uint64_t{1} << 32;
    for (std::uint64_t random : {std::uint64_t{0}, kWords - 1 - ups, kWords - ups, kWords - 1}) {
      if (random >= kWords) continue;
      const auto word = static_cast<std::uint32_t>(random);
      ASSERT_EQ(reference_cast<Format::E4M3>(bits_of(x), mode, word), e4m3.cast(x, mode, word))
          << std::hexfloat << x << " word " << word;
    }
  }
}

TEST(Encode, DoesNotDependOnFlushToZeroOrDenormalsAreZero) {
  const unsigned before = _mm_getcsr();
  std::vector<std::uint32_t> codes[2];
  for (int flush : {0, 1}) {
    _mm_setcsr(flush ? before | 0x8040 : before);  // FTZ and DAZ
    for (std::uint32_t bits = 1; bits < 0x01000000; bits += 4099) {
      const std::uint32_t code = encode_float(std::bit_cast<float>(bits), Format::BF16);
      codes[flush].push_back(code);
      codes[flush].push_back(bits_of(decode_float(code, Format::BF16)));
      codes[flush].push_back(encode_float(std::bit_cast<float>(bits), Format::TF32));
      codes[flush].push_back(bits_of(decode_float(e8m0_ceil(std::bit_cast<float>(bits)), Format::E8M0)));
    }
    _mm_setcsr(before);
  }
  EXPECT_EQ(codes[0], codes[1]);
}

TEST(Encode, RefusesWhatNeedsAnotherCall) {
  EXPECT_THROW((void)encode_float(1, Format::E8M0), Error);
  EXPECT_THROW((void)encode_float(1, Format::E4M3, {.rounding = Rounding::Stochastic}), Error);
  EXPECT_THROW((void)encode_float_stochastic(1, Format::E4M3, {}, {}, 0), Error);
  try {
    (void)encode_float(1, Format::E4M3, {.rounding = Rounding::Stochastic});
    ADD_FAILURE() << "no Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("Call encode_float_stochastic"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace halfstep
