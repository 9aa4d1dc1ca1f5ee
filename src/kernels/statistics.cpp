#include "kernels/statistics.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <memory>
#include <numeric>

#include "kernels/tiles.h"

namespace halfstep {
namespace {

/// From so many values on, 65536 bins cost less than they save.
constexpr std::size_t kLeastForPairs = std::size_t{1} << 19;

/// The formats whose least saturated magnitude begins a place: 61440 in E5M2 and 7 in E2M1, the ties above
/// their max, which go to the even number above.
constexpr std::size_t kSaturatesE5m2 = 4 * (127 + 15) + 3, kSaturatesE2m1 = 4 * (127 + 2) + 2;

}  // namespace

void add_statistics(Format format, const void* values, std::size_t count, TensorStats& stats,
                    const KernelTable& table) {
  const int index = grad_format_index(format);
  const bool pairs = count >= kLeastForPairs;
  const auto bins = std::make_unique<std::uint32_t[]>(pairs ? kPairBins : kByteBins);
  const auto counted = std::make_unique<StatisticsCounts>();
  const StatisticsCounts& c = *counted;
  table.statistics->add[index](values, count, bins.get(), pairs, *counted);

  TensorStats found;
  found.count = static_cast<std::int64_t>(count);
  found.nans = static_cast<std::int64_t>(c.nans);
  found.infinities = static_cast<std::int64_t>(c.infinities);
  found.amax = std::bit_cast<float>(c.largest);
  found.exponents[255] = found.nans + found.infinities;
  std::int64_t nonzero = found.exponents[255];
  for (std::size_t exponent = 1; exponent < 255; ++exponent) {
    const auto ones_from = [&, at = c.places + 4 * exponent](int ones) {
      return static_cast<std::int64_t>(std::accumulate(at + ones, at + 4, std::uint64_t{0}));
    };
    found.exponents[exponent] = ones_from(0);
    found.fractions[exponent + 22] = {.powers_of_two = static_cast<std::int64_t>(c.powers_of_two[exponent]),
                                      .ones_1 = ones_from(1),
                                      .ones_2 = ones_from(2),
                                      .ones_3 = ones_from(3),
                                      .ones_7 = exponent == 1 ? static_cast<std::int64_t>(c.first_ones_7) : 0,
                                      .ones_10 = static_cast<std::int64_t>(c.ones_10[exponent])};
    nonzero += found.exponents[exponent];
  }
  for (std::size_t place = 0; place < found.subnormals.size(); ++place) {
    const StatisticsCounts::Subnormal& here = c.subnormals[place];
    const auto ones = [&](int k) { return static_cast<std::int64_t>(here.ones[k]); };
    found.subnormals[place] = static_cast<std::int64_t>(here.count);
    found.fractions[place] = {.powers_of_two = static_cast<std::int64_t>(here.powers_of_two),
                              .ones_1 = ones(0),
                              .ones_2 = ones(1),
                              .ones_3 = ones(2),
                              .ones_7 = ones(3),
                              .ones_10 = ones(4)};
    found.exponents[0] += found.subnormals[place];
  }
  found.zeros = found.count - nonzero - found.exponents[0];
  found.exponents[0] += found.zeros;

  const auto from_place = [&](std::size_t place) {
    return static_cast<std::int64_t>(std::accumulate(c.places + place, std::end(c.places), std::uint64_t{0}));
  };
  for (std::size_t k = 0; k < 3; ++k) found.saturated[k] = static_cast<std::int64_t>(c.saturated[k]);
  found.saturated[3] = from_place(kSaturatesE5m2);
  found.saturated[4] = from_place(kSaturatesE2m1);

  double lanes[kSumLanes];
  std::copy(c.lanes, c.lanes + kSumLanes, lanes);
  for (std::size_t half = kSumLanes / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  found.sum = lanes[0];
  stats.merge(found);
}

}  // namespace halfstep
