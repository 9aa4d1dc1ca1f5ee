// What the vector loops over values leave to ordinary code.
#pragma once

#include "kernels/kernel_table.h"

namespace halfstep {

/// A value's byte is its place in StatisticsCounts::places, counted from `base`; 1 to 254 are inside.
struct Window {
  std::uint32_t base;
  std::uint32_t least, width;  // magnitudes as bits: the least inside, and so many from there on
};

/// 64 binades: 60 below `largest` and 3 above, inside FP32's normal numbers without their first binade.
Window window_around(std::uint32_t largest);

/// Counts magnitudes one by one: all of what is outside of the window, and of the others what their place
/// does not tell. Returns how many were outside.
std::size_t count_apart(const std::uint32_t* magnitudes, std::size_t count, Window window,
                        StatisticsCounts& counts);

/// Two neighbouring bytes are counted at place w ^ (w >> 5 & kPairMix) of the bins, w the number they make.
/// Loads are compared with the stores before them by the last 12 bits of their addresses, and wait where
/// these agree: so the bits that differ most between exponents, of both bytes, are among them.
inline constexpr std::uint16_t kPairMix = 0xe0;

/// So many values may be counted before a bin can overflow.
inline constexpr std::size_t kMostCounted = std::size_t{1} << 31;

/// Adds the bins to `counts` and sets them to 0. Those of bytes 0 and 255 are dropped: such values are 0, or
/// were counted apart.
void empty_bins(std::uint32_t* bins, bool pairs, Window window, StatisticsCounts& counts);

}  // namespace halfstep
