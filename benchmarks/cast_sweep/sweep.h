// What is swept, what is counted, and where ml_dtypes is known to say something else.
#pragma once

#include <halfstep/formats.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "ml_dtypes_oracle.h"

namespace halfstep::sweep {

inline constexpr Format kSweptFormats[] = {Format::BF16, Format::FP16,     Format::E4M3,
                                           Format::E5M2, Format::E4M3FNUZ, Format::E5M2FNUZ};
inline constexpr int kFormatCount = std::size(kSweptFormats);

struct NamedMode {
  const char* name;
  CastMode mode;
};

inline constexpr NamedMode kModes[] = {
    {"nearest, saturating", {Rounding::NearestEven, Overflow::Saturate, InfInput::Saturate}},
    {"nearest, not saturating", {Rounding::NearestEven, Overflow::NonFinite, InfInput::NonFinite}},
    {"toward zero", {Rounding::TowardZero, Overflow::NonFinite, InfInput::NonFinite}},
};
inline constexpr int kModeCount = std::size(kModes);
inline constexpr int kSaturating = 0, kNotSaturating = 1;  // the two that ml_dtypes can be asked for

/// A class of inputs on which ml_dtypes (FP16: numpy) and Halfstep differ, every one of them and no other.
/// docs/formats.md holds the same list with the reasons.
struct Disagreement {
  Format format;
  const char* inputs;
  bool (*contains)(std::uint32_t fp32_bits);
  std::uint64_t count_of_all_inputs;  // in a full sweep, in each of the two modes
};

inline constexpr Disagreement kDisagreements[] = {
    // 2 * (2^23 - 1) NaNs, without the 2 * 2^13 whose ten upper payload bits are those of the quiet NaN.
    {Format::FP16, "NaNs whose payload numpy keeps",
     [](std::uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000 && (bits & 0x7fe000) != 0x400000; },
     16'760'830},
};

struct Mismatch {
  std::string what;
  std::uint32_t input = 0, got = 0, expected = 0;
};

/// CPU time of one side, over all casts that it did.
struct Cost {
  double seconds = 0;
  std::uint64_t casts = 0;
};

struct Tally {
  std::uint64_t inputs = 0;
  // [format][mode]: kernels against the reference, one row a table; ml_dtypes against the reference.
  std::vector<std::array<std::array<std::uint64_t, kModeCount>, kFormatCount>> kernel_mismatches;
  std::array<std::array<std::uint64_t, kModeCount>, kFormatCount> listed_disagreements{},
      other_disagreements{};
  Cost reference;
  std::vector<Cost> kernels;  // one a table
  std::vector<Mismatch> first_mismatches;
  std::string oracle_versions;

  explicit Tally(std::size_t tables) : kernel_mismatches(tables), kernels(tables) {}
  void add(const Tally& other);
  void note(Mismatch mismatch);
};

/// Every bit pattern, or those where casts go wrong and every 251st of the rest.
std::vector<Range> ranges_to_sweep(bool full);

/// Sweeps the ranges on `threads` threads, each with a Python beside it. `progress` is called now and then
/// with the share that is done.
Tally sweep(const std::vector<Range>& ranges, int threads, const std::string& python,
            void (*progress)(double));

}  // namespace halfstep::sweep
