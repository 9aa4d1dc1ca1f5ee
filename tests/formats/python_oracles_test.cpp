// Against ml_dtypes and gfloat, which share nothing with us but the specifications.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iomanip>
#include <map>
#include <sstream>

#include "formats/reference_cast.h"
#include "formats/spec_oracle.h"

namespace halfstep {
namespace {

std::uint32_t cast_with_word(std::uint32_t bits, Format format, CastMode mode, std::uint32_t random) {
  switch (format) {
    case Format::BF16:
      return reference_cast<Format::BF16>(bits, mode, random);
    case Format::FP16:
      return reference_cast<Format::FP16>(bits, mode, random);
    case Format::E4M3:
      return reference_cast<Format::E4M3>(bits, mode, random);
    case Format::E5M2:
      return reference_cast<Format::E5M2>(bits, mode, random);
    case Format::E4M3FNUZ:
      return reference_cast<Format::E4M3FNUZ>(bits, mode, random);
    case Format::E5M2FNUZ:
      return reference_cast<Format::E5M2FNUZ>(bits, mode, random);
    default:
      throw std::runtime_error("gfloat is not asked for this format");
  }
}

class PythonOracles : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const char* python = std::getenv("HALFSTEP_PYTHON");
    if (!python) return;
    std::ostringstream command;
    command << std::quoted(python) << " " << std::quoted(HALFSTEP_PYTHON_ORACLES);
    FILE* pipe = popen(command.str().c_str(), "r");
    char line[256];
    while (pipe && std::fgets(line, sizeof line, pipe)) {
      std::istringstream words{std::string(line)};
      std::string kind;
      words >> kind;
      lines_[kind].push_back(line + kind.size());
    }
    exit_code_ = pipe ? pclose(pipe) : -1;
  }

  void SetUp() override {
    if (!std::getenv("HALFSTEP_PYTHON"))
      GTEST_SKIP() << "HALFSTEP_PYTHON names no Python with ml_dtypes and gfloat; ctest sets it";
    ASSERT_EQ(exit_code_, 0) << "python_oracles.py failed";
  }

  static Format format_named(const std::string& name) {
    for (const oracle::Spec& spec : oracle::specs())
      if (spec.name == name) return spec.format;
    throw std::runtime_error("python_oracles.py names no format of ours: " + name);
  }

  /// istream does not read hexadecimal floats; strtod does.
  static double read_double(std::istream& words) {
    std::string text;
    words >> text;
    return std::strtod(text.c_str(), nullptr);
  }

  static inline std::map<std::string, std::vector<std::string>> lines_;  // of the script, by their first word
  static inline int exit_code_ = 0;
};

TEST_F(PythonOracles, TraitsAreThoseOfMlDtypes) {
  ASSERT_EQ(lines_["traits"].size(), 8u);
  for (const std::string& line : lines_["traits"]) {
    std::istringstream words(line);
    std::string name;
    int bits = 0, mantissa_bits = 0;
    words >> name >> bits >> mantissa_bits;
    const FormatTraits& t = traits(format_named(name));
    EXPECT_EQ(t.bits, bits) << line;
    EXPECT_EQ(t.mantissa_bits, mantissa_bits) << line;
    EXPECT_EQ(t.max, read_double(words)) << line;
    EXPECT_EQ(t.min_normal, read_double(words)) << line;
    EXPECT_EQ(t.min_subnormal, read_double(words)) << line;
    EXPECT_EQ(t.epsilon, read_double(words)) << line;
  }
}

TEST_F(PythonOracles, EveryCodeDecodesAsInMlDtypes) {
  ASSERT_EQ(lines_["decode"].size(), 2 * 65536u + 5 * 256u + 16u);
  for (const std::string& line : lines_["decode"]) {
    std::istringstream words(line);
    std::string name;
    std::uint32_t code = 0;
    words >> name >> code;
    const double theirs = read_double(words), ours = decode_float(code, format_named(name));
    if (std::isnan(theirs)) {
      EXPECT_TRUE(std::isnan(ours)) << line;
    } else {
      EXPECT_EQ(ours, theirs) << line;
      EXPECT_EQ(std::signbit(ours), std::signbit(theirs)) << line;
    }
  }
}

TEST_F(PythonOracles, E2m1RoundsToNearestAsInMlDtypes) {
  ASSERT_GT(lines_["encode"].size(), 200u);
  for (const std::string& line : lines_["encode"]) {
    std::istringstream words(line);
    std::string name;
    std::uint32_t bits = 0, code = 0;
    words >> name >> bits >> code;
    EXPECT_EQ(encode_float(std::bit_cast<float>(bits), format_named(name)), code) << line;
  }
}

TEST_F(PythonOracles, TowardZeroAndStochasticRoundAsInGfloat) {
  ASSERT_GT(lines_["round"].size(), 20000u);
  for (const std::string& line : lines_["round"]) {
    std::istringstream words(line);
    std::string name, rounding;
    std::uint32_t bits = 0, random = 0;
    words >> name >> rounding >> bits >> random;
    const Format format = format_named(name);
    const double theirs = read_double(words);
    const CastMode mode{rounding == "stochastic" ? Rounding::Stochastic : Rounding::TowardZero,
                        Overflow::NonFinite};
    const float ours = decode_float(cast_with_word(bits, format, mode, random), format);
    ASSERT_TRUE(ours == theirs || (std::isnan(ours) && std::isnan(theirs))) << line << " ours " << ours;
  }
}

}  // namespace
}  // namespace halfstep
