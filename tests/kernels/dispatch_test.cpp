#include "kernels/dispatch.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <cstdio>
#include <cstdlib>

#include "base/cpu_features.h"

namespace halfstep {
namespace {

TEST(Dispatch, ScalarIsAlwaysThereAndTheOthersWhereTheProcessorHasThem) {
  EXPECT_EQ(&kernels_of_isa("scalar"), &kScalarKernels);
  const auto offers = [](const KernelTable& wanted) {
    for (const KernelTable* table : available_kernels())
      if (table == &wanted) return true;
    return false;
  };
  EXPECT_EQ(offers(kAvx2Kernels), cpu_features().avx2);
  EXPECT_EQ(offers(kAvx512Kernels), cpu_features().avx512);
  EXPECT_EQ(offers(kAmxKernels), may_use_amx_bf16());
}

TEST(Dispatch, EveryTableHasEveryKernelOfTheEightCastableFormats) {
  for (const KernelTable* table : available_kernels())
    for (int f = 0; f < kFormatCount; ++f) {
      const FormatKernels& row = table->format[f];
      const bool castable = Format(f) != Format::FP32 && Format(f) != Format::E8M0;
      EXPECT_EQ(row.nearest_even != nullptr, castable) << table->isa << " " << f;
      EXPECT_EQ(row.toward_zero != nullptr, castable) << table->isa << " " << f;
      EXPECT_EQ(row.stochastic != nullptr, castable) << table->isa << " " << f;
      EXPECT_EQ(row.decode != nullptr, castable) << table->isa << " " << f;
    }
}

TEST(Dispatch, AnUnknownIsaIsRefusedWithThoseThereAre) {
  for (const char* isa : {"sse9", "", "AVX2", "avx2 "}) {
    try {
      kernels_of_isa(isa);
      FAIL() << "accepted '" << isa << "'";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("Available here: " + available_isas()), std::string::npos)
          << error.what();
    }
  }
}

/// What a fresh process makes of HALFSTEP_ISA: exits with 0 and says which table it took, or with 3 and the
/// error.
[[noreturn]] void report_choice(const char* isa) {
  isa ? setenv("HALFSTEP_ISA", isa, 1) : unsetenv("HALFSTEP_ISA");
  try {
    std::fprintf(stderr, "took %s\n", kernels().isa);
    std::exit(0);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::exit(3);
  }
}

class DispatchInAFreshProcess : public testing::Test {
 protected:
  // The choice is made once a process, so each question needs a process that has not chosen yet.
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(DispatchInAFreshProcess, EnvironmentForcesEachAvailableIsa) {
  for (const KernelTable* table : available_kernels())
    EXPECT_EXIT(report_choice(table->isa), testing::ExitedWithCode(0), std::string("took ") + table->isa);
}

TEST_F(DispatchInAFreshProcess, TheWidestIsTakenWhenNothingIsForced) {
  EXPECT_EXIT(report_choice(nullptr), testing::ExitedWithCode(0),
              std::string("took ") + available_kernels().back()->isa);
}

TEST_F(DispatchInAFreshProcess, AnUnknownIsaIsRefusedRatherThanReplaced) {
  EXPECT_EXIT(report_choice("neon"), testing::ExitedWithCode(3), "no kernels called 'neon'.*scalar");
}

}  // namespace
}  // namespace halfstep
