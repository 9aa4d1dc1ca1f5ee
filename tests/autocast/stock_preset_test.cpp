// Stock behaviour, bit for bit: the `stock` preset, and bare regions beside a loaded Halfstep. The witness
// is a process into which Halfstep is not loaded.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>

#include <cstdio>

#include "support/any_machine.h"
#include "support/autocast_transcript.h"

namespace halfstep::testing {
namespace {

std::vector<std::string> stock_transcript() {
  std::vector<std::string> lines;
  FILE* const pipe = popen(HALFSTEP_STOCK_TRANSCRIPT, "r");
  std::string line;
  for (int c; pipe && (c = std::fgetc(pipe)) != EOF;) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    lines.push_back(line);
    line.clear();
  }
  EXPECT_TRUE(pipe && pclose(pipe) == 0) << HALFSTEP_STOCK_TRANSCRIPT << " failed";
  return lines;
}

void expect_equal(const std::vector<std::string>& ours, const std::vector<std::string>& stock) {
  ASSERT_EQ(ours.size(), stock.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_EQ(ours[i], stock[i]);
}

TEST(EnginePreset, HasTheBitsOfStockAutocast) {
  const auto ours = autocast_transcript([](at::ScalarType low) {
    return std::make_shared<AutocastScope>(low, OpPolicy::stock(), kAnyMachine);
  });
  expect_equal(ours, stock_transcript());
}

TEST(EnginePreset, BareRegionsBesideALoadedHalfstepHaveTheBitsOfStockAutocast) {
  expect_equal(autocast_transcript(bare_region()), stock_transcript());
}

TEST(EnginePreset, TheTranscriptTellsLowPrecisionFromFp32AndStandardFromStock) {
  const auto stock = stock_transcript();
  const auto fp32 = autocast_transcript([](at::ScalarType) { return std::shared_ptr<void>(); });
  const auto standard = autocast_transcript([](at::ScalarType low) {
    return std::make_shared<AutocastScope>(low, OpPolicy::standard(), kAnyMachine);
  });
  size_t model_count = 0;
  for (size_t i = 0; i < stock.size(); ++i) {
    if (stock[i].find("transformer") != 0 && stock[i].find("conv net") != 0) continue;
    ++model_count;
    EXPECT_NE(fp32[i], stock[i]);
    // A transformer on an FP32 residual stream meets no row where `standard` differs from stock CPU.
    if (stock[i].find("conv net") == 0) {
      EXPECT_NE(standard[i], stock[i]);
    }
  }
  EXPECT_EQ(model_count, 4u);
}

}  // namespace
}  // namespace halfstep::testing
