// The sweeps of tools/crash_sweep, thinned.
#include <gtest/gtest.h>

#include "checkpoint/sweep/sweep.h"

namespace halfstep::testing {
namespace {

void expect_no_faults(const SweepResult& result, int64_t points) {
  EXPECT_GE(result.points, points);
  EXPECT_EQ(result.fault_count, 0) << (result.faults.empty() ? "" : result.faults.front());
}

TEST(CrashSweep, AKillAtAnyCallLosesNoSavedCheckpoint) { expect_no_faults(sweep_kills(scenario(1)), 75); }

TEST(CrashSweep, ALossOfPowerAtAnyMomentLeavesThePreviousOrTheNewCheckpoint) {
  expect_no_faults(sweep_power(scenario(2), 4), 200);
}

TEST(CrashSweep, ALossOfPowerWhileACrashIsTidiedUpLosesNothing) {
  expect_no_faults(sweep_kill_then_power(scenario(1), 50), 200);
}

TEST(CrashSweep, AnyErrorAtAnyCallIsTypedAndThePreviousCheckpointWhole) {
  expect_no_faults(sweep_errors(scenario(1)), 250);
}

TEST(CrashSweep, DamageIsRefused) {
  expect_no_faults(sweep_damage(size_t{64} << 10, 97), 9 * (64 << 10) / 97);
}

// A sweep that finds nothing must be able to find something.
TEST(CrashSweep, ABrokenProtocolIsFound) {
  EXPECT_GT(sweep_power(scenario(2), 4, {.folder = "", .no_file_sync = true}).fault_count, 0);
  EXPECT_GT(sweep_power(scenario(2), 4, {.folder = "", .no_folder_sync = true}).fault_count, 0);
  EXPECT_GT(sweep_kills(scenario(1), {.folder = "", .dropped_prefix = ".aside-"}).fault_count, 0);
  EXPECT_GT(sweep_kills(scenario(1), {.folder = "", .dropped_prefix = ".removed-"}).fault_count, 0);
}

}  // namespace
}  // namespace halfstep::testing
