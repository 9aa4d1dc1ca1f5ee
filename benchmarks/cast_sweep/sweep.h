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
inline constexpr int kSweptCount = std::size(kSweptFormats);

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
inline constexpr int kSaturating = 0, kNotSaturating = 1, kTowardZero = 2;

/// Who else is asked.
enum class Oracle {
  MlDtypes,   // all formats, nearest, and toward zero by a step back; numpy for FP16, nearest alone
  Processor,  // FP16, not saturating and toward zero: the F16C instruction
};
inline constexpr const char* kOracleNames[] = {"ml_dtypes", "processor"};
inline constexpr int kOracleCount = std::size(kOracleNames);

constexpr bool is_asked(Oracle oracle, Format format, int mode) {
  return oracle == Oracle::MlDtypes ? format != Format::FP16 || mode != kTowardZero
                                    : format == Format::FP16 && mode != kSaturating;
}

/// A class of inputs on which an oracle and Halfstep differ, every one of them and no other. docs/formats.md
/// holds the same list with the reasons.
struct Disagreement {
  Oracle oracle;
  Format format;
  const char* inputs;
  bool (*contains)(std::uint32_t fp32_bits);
  std::uint64_t count_of_all_inputs;  // in a full sweep, in each mode that the oracle is asked for
};

constexpr bool is_nan(std::uint32_t fp32_bits) { return (fp32_bits & 0x7fffffff) > 0x7f800000; }

inline constexpr Disagreement kDisagreements[] = {
    // Of the 2 * (2^23 - 1) NaNs, numpy keeps the ten upper payload bits: 2 * 2^13 have those of our quiet
    // NaN.
    {Oracle::MlDtypes, Format::FP16, "NaNs whose payload numpy keeps",
     [](std::uint32_t bits) { return is_nan(bits) && (bits & 0x7fe000) != 0x400000; }, 16'760'830},
    // The instruction sets the quiet bit besides, and 2 * (2^13 - 1) more become ours.
    {Oracle::Processor, Format::FP16, "NaNs whose payload the processor keeps",
     [](std::uint32_t bits) { return is_nan(bits) && (bits & 0x3fe000) != 0; }, 16'744'448},
};

struct Mismatch {
  std::string what;
  std::uint32_t input = 0, got = 0, expected = 0;
};

struct OracleCounts {
  std::uint64_t listed = 0, unlisted = 0;
};

/// CPU time of one side, over all casts that it did.
struct Cost {
  double seconds = 0;
  std::uint64_t casts = 0;
};

struct Tally {
  std::uint64_t inputs = 0;
  template <typename Count>
  using PerCast = std::array<std::array<Count, kModeCount>, kSweptCount>;  // [format][mode]
  std::vector<PerCast<std::uint64_t>> kernel_mismatches;                   // with the reference; one a table
  std::array<PerCast<OracleCounts>, kOracleCount> oracles;                 // disagreements with the reference
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
