// One pass over values in vectors: the same counts and the same sums as statistics_scalar.cpp. Each ISA's
// file includes this once and supplies the operations; all is local to that file, see avx512.cpp for why.
//
// A histogram is bound by its stores, one for each value. Here a value becomes one byte, and two neighbouring
// bytes are counted together. The byte is the exponent and how many ones the fraction begins with, as a place
// in a window of 64 binades. What that does not tell is rare in training, and counted apart one by one:
// powers of two and fractions that begin with ten ones, as they are met; and values outside of the window,
// for which a block of values is read again.
#pragma once

#include "kernels/cast_constants.h"
#include "kernels/statistics_apart.h"

namespace halfstep {
namespace {

/// `Isa` has vectors of 32-bit words and the operations on them.
template <typename Isa>
struct VectorStatistics {
  using Words = typename Isa::Words;
  using Halves = typename Isa::Halves;
  using Doubles = typename Isa::Doubles;
  static constexpr std::size_t kWidth = sizeof(Words) / 4, kDoubles = kWidth / 2;
  static constexpr std::size_t kStep = 4 * kWidth;  // values whose bytes are stored together
  static constexpr std::size_t kBlock = 4096;       // values in the first cache, and what is made of them
  static constexpr std::size_t kSumVectors = kSumLanes / kDoubles;
  static constexpr std::size_t kReadAheadBytes = 4096;  // the processor itself stops at the end of a page

  template <int format>
  static const char* at(const void* values, std::size_t i) {
    return static_cast<const char*>(values) + i * (format == kFp32Grads ? 4 : 2);
  }

  template <int format>
  static std::uint32_t largest_of(const void* values, std::size_t count) {
    Words largest = {};
    for (std::size_t i = 0; i < count; i += kWidth) {
      const Words bits = Isa::template load<format>(at<format>(values, i));
      largest = Isa::larger(largest, Isa::finite_or_zero(bits) & ~kFp32Sign);
    }
    return Isa::largest_lane(largest);
  }

  /// Adds a vector's values to the sums of their lanes. FP32 is converted as it is loaded again, which takes
  /// less than parting a vector.
  template <int format>
  static void add_to_lanes(Doubles* sums, std::size_t vector, const char* here, Words bits) {
    Doubles* lanes = sums + vector * 2 % kSumVectors;
    if constexpr (format == kFp32Grads) {
      lanes[0] += Isa::doubles_at(here);
      lanes[1] += Isa::doubles_at(here + sizeof(Words) / 2);
    } else {
      lanes[0] += Isa::low_doubles(bits);
      lanes[1] += Isa::high_doubles(bits);
    }
  }

  /// The bytes of one step on their way into the bins.
  struct Pairs {
    alignas(64) std::uint16_t pairs[kStep / 2];

    void keep(Halves of_step) {
      const Halves mixed = of_step ^ (of_step >> 5 & kPairMix);
      __builtin_memcpy(pairs, &mixed, sizeof mixed);
    }
    void count(std::uint32_t* bins) const {
#pragma GCC unroll 32
      for (std::size_t i = 0; i < kStep / 2; ++i) {
        std::uint32_t* bin = bins + pairs[i];
        asm("" : "+r"(bin));  // a sum in the instruction's address would take one of the two units that load
        ++*bin;
      }
    }
  };

  struct Bytes {
    alignas(64) std::uint8_t bytes[kStep];

    void keep(Halves of_step) { __builtin_memcpy(bytes, &of_step, sizeof of_step); }
    // Neighbours are often equal, and an increment would wait for the one before.
    void count(std::uint32_t* bins) const {
#pragma GCC unroll 64
      for (std::size_t i = 0; i < kStep; ++i) ++bins[i % 4 * 256 + bytes[i]];
    }
  };

  /// What was met in a block of values.
  struct Block {
    std::uint32_t largest, least_minus_1;  // magnitudes; 0 minus 1 is the greatest number
    std::size_t apart;                     // magnitudes in the list

    bool is_inside(Window window) const {
      return least_minus_1 >= window.least - 1 &&
             (largest < window.least || largest - window.least < window.width);
    }
  };

  /// Counts the values in `bins`, adds them to `lanes`, and puts magnitudes that are to be counted apart into
  /// a list. `count` is a multiple of kStep. If values are outside of the window, only `bins` is right then,
  /// and that the result is not inside.
  template <int format, typename Counted>
  static Block read(const void* values, std::size_t count, Window window, double* lanes, std::uint32_t* bins,
                    std::uint32_t* apart) {
    Doubles sums[kSumVectors];
    for (std::size_t v = 0; v < kSumVectors; ++v) sums[v] = Isa::load_doubles(lanes + v * kDoubles);
    Words largest = {}, least_minus_1 = ~Words{};
    std::size_t apart_count = 0;
    Counted counted[2];
    counted[1].keep(Halves{});  // empty_bins drops what was counted for 0
    for (std::size_t i = 0; i < count; i += kStep) {
      Words magnitudes[4];
#pragma GCC unroll 4
      for (std::size_t v = 0; v < 4; ++v) {
        const char* here = at<format>(values, i + v * kWidth);
        __builtin_prefetch(
            reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(here) + kReadAheadBytes));
        const Words bits = Isa::template load<format>(here);
        magnitudes[v] = bits & ~kFp32Sign;
        largest = Isa::larger(largest, magnitudes[v]);
        least_minus_1 = Isa::lesser(least_minus_1, magnitudes[v] - 1);
        add_to_lanes<format>(sums, v, here, bits);
      }
      // One step later, when the stores of this one are done.
      counted[(i / kStep + 1) % 2].count(bins);
      counted[i / kStep % 2].keep(Isa::bytes_of(magnitudes, window.base));
      if (Isa::may_have_edges(magnitudes)) [[unlikely]]
        for (const Words of_vector : magnitudes)
          apart_count += Isa::store_where(apart + apart_count, of_vector, Isa::edges(of_vector));
    }
    counted[(count / kStep + 1) % 2].count(bins);
    for (std::size_t v = 0; v < kSumVectors; ++v) Isa::store_doubles(lanes + v * kDoubles, sums[v]);
    return {Isa::largest_lane(largest), Isa::least_lane(least_minus_1), apart_count};
  }

  /// The same for a block of which some values are outside, but for `bins`; `largest` is of finite values.
  template <int format>
  static Block read_outside(const void* values, std::size_t count, Window window, double* lanes,
                            std::uint32_t* apart) {
    Doubles sums[kSumVectors];
    for (std::size_t v = 0; v < kSumVectors; ++v) sums[v] = Isa::load_doubles(lanes + v * kDoubles);
    Words largest = {};
    std::size_t apart_count = 0;
    for (std::size_t i = 0; i < count; i += kStep)
      for (std::size_t v = 0; v < 4; ++v) {
        const Words bits = Isa::template load<format>(at<format>(values, i + v * kWidth));
        const Words magnitudes = bits & ~kFp32Sign;
        const Words finite = Isa::finite_or_zero(bits);
        apart_count += Isa::store_where(apart + apart_count, magnitudes,
                                        Isa::edges(magnitudes) | Isa::outside(magnitudes, window));
        largest = Isa::larger(largest, finite & ~kFp32Sign);
        sums[v * 2 % kSumVectors] += Isa::low_doubles(finite);
        sums[v * 2 % kSumVectors + 1] += Isa::high_doubles(finite);
      }
    for (std::size_t v = 0; v < kSumVectors; ++v) Isa::store_doubles(lanes + v * kDoubles, sums[v]);
    return {Isa::largest_lane(largest), 0, apart_count};
  }

  template <int format>
  static std::uint64_t count_saturated(const void* values, std::size_t count, std::uint32_t least) {
    std::uint64_t found = 0;
    for (std::size_t i = 0; i < count; i += kWidth)
      found += Isa::count_from(Isa::template load<format>(at<format>(values, i)) & ~kFp32Sign, least);
    return found;
  }

  template <int format>
  static void add(const void* values, std::size_t count, std::uint32_t* bins, bool pairs,
                  StatisticsCounts& counts) {
    std::uint32_t apart[kBlock + kWidth];
    const std::size_t in_steps = count / kStep * kStep;
    Window window = window_around(largest_of<format>(values, in_steps < kBlock ? in_steps : kBlock));
    std::size_t counted = 0;  // in `bins`
    for (std::size_t i = 0; i < in_steps;) {
      const std::size_t size = in_steps - i < kBlock ? in_steps - i : kBlock;
      const char* block = at<format>(values, i);
      double lanes[kSumLanes];
      __builtin_memcpy(lanes, counts.lanes, sizeof lanes);
      Block found = pairs ? read<format, Pairs>(block, size, window, lanes, bins, apart)
                          : read<format, Bytes>(block, size, window, lanes, bins, apart);
      if (found.is_inside(window))
        __builtin_memcpy(counts.lanes, lanes, sizeof lanes);
      else
        found = read_outside<format>(block, size, window, counts.lanes, apart);
      const std::size_t outside = count_apart(apart, found.apart, window, counts);
      for (int k = 0; k < 3; ++k)
        if (found.largest >= kSaturates[k])
          counts.saturated[k] += count_saturated<format>(block, size, kSaturates[k]);
      if (found.largest > counts.largest) counts.largest = found.largest;
      i += size;
      counted += size;
      // The window follows the values, but not at every block: emptying the bins takes as long as some
      // blocks.
      const bool misplaced =
          outside > size / 8 && found.largest != 0 && (i == size || counted >= 64 * kBlock);
      if (misplaced || counted >= kMostCounted) {
        empty_bins(bins, pairs, window, counts);
        counted = 0;
        if (misplaced) window = window_around(found.largest);
      }
    }
    empty_bins(bins, pairs, window, counts);
    kScalarStatistics.add[format](at<format>(values, in_steps), count - in_steps, nullptr, false, counts);
  }

  static constexpr StatisticsPass pass() {
    return {.add = {add<kFp32Grads>, add<kBf16Grads>, add<kFp16Grads>}};
  }
};

}  // namespace
}  // namespace halfstep
