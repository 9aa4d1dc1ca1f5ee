// What the values of a tensor are, in numbers: magnitudes by exponent, and how many of them a format would
// lose.
#pragma once

#include <halfstep/config.h>
#include <halfstep/formats.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace halfstep {

/// What a cast with round to nearest, ties to even, makes of a tensor: shares of all its values, 0 to 1.
struct FormatShares {
  double zero = 0;        ///< become 0 though they are not
  double subnormal = 0;   ///< become subnormal, after rounding: they lose significant bits
  double saturated = 0;   ///< finite, and more than the format's largest number after rounding
  double non_finite = 0;  ///< NaN or Inf already
};

/// Where the values of one binade lie, 2^e up to 2^(e+1): what decides how those next to a format's limits
/// are rounded.
struct FractionCounts {
  std::int64_t powers_of_two = 0;  ///< exactly 2^e
  std::int64_t ones_1 = 0;         ///< the first bit behind the leading one is set: 1.5 * 2^e and above
  std::int64_t ones_2 = 0;         ///< the first two are
  std::int64_t ones_3 = 0;         ///< the first three are
  std::int64_t ones_7 = 0;   ///< the first seven are; counted below 2^-125 alone, where BF16's limits are
  std::int64_t ones_10 = 0;  ///< the first ten are
};

/// Statistics of the values of a tensor, or of several after merge().
///
/// Every member is a sum of counts, or a maximum, so that statistics of parts are merged exactly and in any
/// order. The exception is `sum`, whose last bits depend on the order of the parts.
///
/// `in` and `in_scaled` are exact: the counts of values that a cast would produce, divided by `count`. They
/// take FP32, BF16, FP16, E4M3, E5M2 and E2M1 and refuse other formats.
///
/// About 16 KB; packed() is some hundred numbers.
struct HALFSTEP_API TensorStats {
  /// Binades of FP32: 2^-149, the smallest subnormal, to 2^127.
  static constexpr int kLeastExponent = -149, kLargestExponent = 127;
  static constexpr int kBinades = kLargestExponent - kLeastExponent + 1;

  std::int64_t count = 0;  ///< all values
  std::int64_t zeros = 0;
  std::int64_t nans = 0;
  std::int64_t infinities = 0;
  double sum = 0;  ///< of the finite values, in FP64
  float amax = 0;  ///< the largest finite magnitude; 0 where there is none
  /// By FP32's exponent field e, magnitudes from 2^(e-127) up to 2^(e-126). [0] holds zeros and FP32's
  /// subnormals, [255] NaN and Inf.
  std::array<std::int64_t, 256> exponents{};
  /// FP32's subnormals by their leading bit: [k] from 2^(k-149) up to 2^(k-148).
  std::array<std::int64_t, 23> subnormals{};
  /// By binade: [0] from 2^-149, [276] from 2^127.
  std::array<FractionCounts, kBinades> fractions{};
  /// How many finite values are too large for a format: BF16, FP16, E4M3, E5M2, E2M1 in this order.
  std::array<std::int64_t, 5> saturated{};

  /// Adds the values that `other` describes.
  void merge(const TensorStats& other);

  std::int64_t finite() const { return count - nans - infinities; }  ///< how many values are finite
  double mean() const;                                               ///< of the finite values; 0 without any
  /// How many values have magnitudes from 2^exponent up to 2^(exponent+1); subnormals have binades too.
  std::int64_t in_binade(int exponent) const;

  /// What a cast to `format` would do.
  FormatShares in(Format format) const;
  /// What it would do behind a multiplication by the largest power of two with which `amax` is at most the
  /// format's largest number: nothing saturates, and what is lost is too small beside the largest value.
  FormatShares in_scaled(Format format) const;

  /// As whole numbers, from the first binade with a value to the last: for logs and other processes.
  std::vector<std::int64_t> packed() const;
  /// The inverse. Numbers that packed() does not write are an Error.
  static TensorStats unpacked(std::span<const std::int64_t> numbers);
};

/// What the products of a run take in.
struct ProductFormat {
  Format format = Format::FP16;
  bool scaled = false;  ///< with a scale that makes the largest value the format's largest

  /// What a cast to it would do. Scales of blocks are taken for one of the whole tensor, which loses more.
  FormatShares shares(const TensorStats& stats) const {
    return scaled ? stats.in_scaled(format) : stats.in(format);
  }
};

/// The format that a run with this word of precision.compute gives tensors of a ProbeRecord's role as
/// operands: "weight", "activation" or "gradient". Nothing for "update", and in FP32 and TF32.
[[nodiscard]] HALFSTEP_API std::optional<ProductFormat> product_format(std::string_view compute,
                                                                       std::string_view role);

}  // namespace halfstep
