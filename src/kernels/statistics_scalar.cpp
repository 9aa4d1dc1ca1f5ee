// The twin of the statistics, and what the vector loops leave to it.
#include <algorithm>
#include <bit>

#include "kernels/cast_constants.h"
#include "kernels/statistics_apart.h"

namespace halfstep {
namespace {

template <int format>
std::uint32_t bits_at(const void* values, std::size_t i) {
  if constexpr (format == kFp32Grads) return static_cast<const std::uint32_t*>(values)[i];
  const std::uint16_t code = static_cast<const std::uint16_t*>(values)[i];
  if constexpr (format == kBf16Grads) return std::uint32_t{code} << 16;
  float value;
  kScalarKernels.format[static_cast<int>(Format::FP16)].decode(&code, &value, 1);
  return std::bit_cast<std::uint32_t>(value);
}

template <int format>
void add(const void* values, std::size_t count, std::uint32_t*, bool, StatisticsCounts& counts) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_at<format>(values, i), magnitude = bits & ~kFp32Sign;
    if (magnitude == 0) continue;
    count_apart(&magnitude, 1, {}, counts);
    if (magnitude >= kFp32Inf) continue;
    counts.lanes[i % kSumLanes] += std::bit_cast<float>(bits);
    counts.largest = std::max(counts.largest, magnitude);
    for (int k = 0; k < 3; ++k) counts.saturated[k] += magnitude >= kSaturates[k];
  }
}

constexpr std::uint32_t kFraction = kFp32HiddenBit - 1;

bool begins_with_ones(std::uint32_t fraction, int ones) {
  return (~fraction & kFraction) >> (23 - ones) == 0;
}

/// The place of a normal number, and the least magnitude of a place.
std::uint32_t place_of(std::uint32_t magnitude) {
  std::uint32_t ones = 0;
  while (ones < 3 && begins_with_ones(magnitude & kFraction, static_cast<int>(ones) + 1)) ++ones;
  return 4 * (magnitude >> 23) + ones;
}
std::uint32_t least_at(std::uint32_t place) {
  constexpr std::uint32_t kFractions[] = {0, 0x400000, 0x600000, 0x700000};
  return (place / 4) << 23 | kFractions[place % 4];
}

void count_subnormal(std::uint32_t magnitude, StatisticsCounts& counts) {
  const int place = std::bit_width(magnitude) - 1;
  const std::uint32_t fraction = (magnitude << (23 - place)) & kFraction;
  StatisticsCounts::Subnormal& found = counts.subnormals[place];
  ++found.count;
  found.powers_of_two += fraction == 0;
  constexpr int kOnes[] = {1, 2, 3, 7, 10};
  for (int k = 0; k < 5; ++k) found.ones[k] += begins_with_ones(fraction, kOnes[k]);
}

}  // namespace

Window window_around(std::uint32_t largest) {
  constexpr std::uint32_t kFirst = 4 * 2, kLast = 4 * 254 + 3;
  const std::uint32_t last = std::clamp(4 * (largest >> 23) + 15, kFirst + 253, kLast);
  const std::uint32_t base = last - 254;
  const std::uint32_t least = least_at(base + 1);
  return {.base = base, .least = least, .width = least_at(last + 1) - least};
}

std::size_t count_apart(const std::uint32_t* magnitudes, std::size_t count, Window window,
                        StatisticsCounts& counts) {
  std::size_t outside = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = magnitudes[i], exponent = magnitude >> 23,
                        fraction = magnitude & kFraction;
    const bool is_outside = magnitude - window.least >= window.width;
    outside += is_outside;
    if (exponent == 255) {
      ++(fraction == 0 ? counts.infinities : counts.nans);
    } else if (exponent == 0) {
      count_subnormal(magnitude, counts);
    } else {
      if (is_outside) ++counts.places[place_of(magnitude)];
      counts.powers_of_two[exponent] += fraction == 0;
      counts.ones_10[exponent] += begins_with_ones(fraction, 10);
      if (exponent == 1) counts.first_ones_7 += begins_with_ones(fraction, 7);
    }
  }
  return outside;
}

void empty_bins(std::uint32_t* bins, bool pairs, Window window, StatisticsCounts& counts) {
  std::uint64_t of_byte[256] = {};
  if (pairs) {
    for (std::size_t high = 0; high < 256; ++high) {
      const std::uint32_t* row = bins + high * 256;
      std::uint64_t sum = 0;
      // In runs that the mix leaves together.
      for (std::size_t run = 0; run < 256; run += 32) {
        std::uint64_t* lows = of_byte + (run ^ (high << 3 & kPairMix));
        for (std::size_t i = 0; i < 32; ++i) {
          lows[i] += row[run + i];
          sum += row[run + i];
        }
      }
      of_byte[high] += sum;
    }
  } else {
    for (std::size_t i = 0; i < kByteBins; ++i) of_byte[i % 256] += bins[i];
  }
  std::fill_n(bins, pairs ? kPairBins : kByteBins, 0);
  for (std::size_t byte = 1; byte < 255; ++byte) counts.places[window.base + byte] += of_byte[byte];
}

constinit const StatisticsPass kScalarStatistics = {
    .add = {add<kFp32Grads>, add<kBf16Grads>, add<kFp16Grads>}};

}  // namespace halfstep
