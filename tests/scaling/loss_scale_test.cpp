// The state machine alone. Its equality with torch.amp is shown by scaler_parity.
#include <gtest/gtest.h>
#include <halfstep/scaling.h>

#include <cmath>
#include <limits>

namespace halfstep {
namespace {

LossScaleState after(const LossScaling& options, LossScaleState state, bool grads_finite, int times) {
  for (int i = 0; i < times; ++i) state = next_state(options, state, grads_finite);
  return state;
}

TEST(LossScale, DoublesAfterGrowthIntervalCleanSteps) {
  const LossScaling options{.growth_interval = 5};
  const auto four = after(options, initial_state(options), true, 4);
  EXPECT_EQ(four.loss_scale, 0x1p16);
  EXPECT_EQ(four.clean_steps, 4);
  const auto five = next_state(options, four, true);
  EXPECT_EQ(five.loss_scale, 0x1p17);
  EXPECT_EQ(five.clean_steps, 0);
}

TEST(LossScale, OneOverflowHalvesTheScaleAndRestartsTheCount) {
  const LossScaling options{.growth_interval = 5};
  const auto state = next_state(options, after(options, initial_state(options), true, 4), false);
  EXPECT_EQ(state.loss_scale, 0x1p15);
  EXPECT_EQ(state.clean_steps, 0);
  EXPECT_EQ(state.consecutive_skips, 1);
}

TEST(LossScale, HysteresisForgivesAsManyOverflowsAsAskedUntilTheScaleHasGrown) {
  const LossScaling options{.growth_interval = 2, .hysteresis = 3};
  auto state = after(options, initial_state(options), false, 2);
  EXPECT_EQ(state.loss_scale, 0x1p16);
  state = next_state(options, state, false);
  EXPECT_EQ(state.loss_scale, 0x1p15);
  state = next_state(options, state, false);  // patience is used up
  EXPECT_EQ(state.loss_scale, 0x1p14);
  state = after(options, state, true, 2);  // grows, and is patient again
  EXPECT_EQ(state.loss_scale, 0x1p15);
  EXPECT_EQ(after(options, state, false, 2).loss_scale, 0x1p15);
  EXPECT_EQ(after(options, state, false, 3).loss_scale, 0x1p14);
}

TEST(LossScale, TenThousandOverflowsEndAtTheFloorWithAFiniteInverse) {
  for (const double floor : {0x1p-24, 0x1p-126, 1.0}) {
    const LossScaling options{.floor = floor};
    const auto state = after(options, initial_state(options), false, 10'000);
    EXPECT_EQ(state.loss_scale, floor);
    EXPECT_TRUE(std::isfinite(static_cast<float>(1.0 / state.loss_scale)));
    EXPECT_EQ(state.total_skips, 10'000);
  }
}

TEST(LossScale, TenThousandGrowthsEndAtTheCapWithANormalInverse) {
  for (const double cap : {0x1p126, 0x1p24}) {
    const LossScaling options{.growth_interval = 1, .cap = cap};
    const auto state = after(options, initial_state(options), true, 10'000);
    EXPECT_EQ(state.loss_scale, cap);
    EXPECT_GE(static_cast<float>(1.0 / state.loss_scale), std::numeric_limits<float>::min());
  }
}

// Factors that are no powers of two: the scale must stay a value that FP32 holds, or a saved run could not
// follow the same path.
TEST(LossScale, EveryScaleIsAnFp32Value) {
  const LossScaling options{
      .initial = 1000.1, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 2};
  auto state = initial_state(options);
  for (int step = 0; step < 500; ++step) {
    EXPECT_EQ(state.loss_scale, static_cast<float>(state.loss_scale)) << "step " << step;
    state = next_state(options, state, step % 7 != 3);
  }
}

TEST(LossScale, BoundsThatFp32DoesNotHoldAreStillBounds) {
  const LossScaling options{.initial = 0.05, .growth_interval = 1, .floor = 1e-4, .cap = 0.1};
  const auto lowest = after(options, initial_state(options), false, 100);
  EXPECT_GE(lowest.loss_scale, 1e-4);
  EXPECT_LT(lowest.loss_scale, 1e-4 * (1 + 0x1p-23));
  const auto highest = after(options, initial_state(options), true, 100);
  EXPECT_LE(highest.loss_scale, 0.1);
  EXPECT_GT(highest.loss_scale, 0.1 * (1 - 0x1p-23));
}

TEST(LossScale, OptionsThatMakeNoSenseAreRefusedByName) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double inf = std::numeric_limits<double>::infinity();
  const std::pair<LossScaling, const char*> cases[] = {
      {{.initial = nan}, "initial"},
      {{.initial = 0}, "initial"},
      {{.initial = -1}, "initial"},
      {{.initial = inf}, "initial"},
      {{.initial = 0x1p127}, "initial"},
      {{.growth_factor = 1.0}, "growth_factor"},
      {{.growth_factor = inf}, "growth_factor"},
      {{.growth_factor = nan}, "growth_factor"},
      {{.backoff_factor = 0}, "backoff_factor"},
      {{.backoff_factor = 1}, "backoff_factor"},
      {{.backoff_factor = nan}, "backoff_factor"},
      {{.growth_interval = 0}, "growth_interval"},
      {{.hysteresis = 0}, "hysteresis"},
      {{.floor = 0}, "floor"},
      {{.floor = nan}, "floor"},
      {{.floor = 0x1p-127}, "floor"},
      {{.cap = 0x1p127}, "cap"},
      {{.cap = nan}, "cap"},
      {{.initial = 1e-4, .floor = 1e-4, .cap = 1e-4}, "between floor and cap"},
      {{.max_consecutive_skips = -1}, "max_consecutive_skips"},
  };
  for (const auto& [options, field] : cases) {
    try {
      options.check();
      ADD_FAILURE() << field << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("LossScaling: ") + field), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace halfstep
