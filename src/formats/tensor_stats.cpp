#include <halfstep/error.h>
#include <halfstep/tensor_stats.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace halfstep {
namespace {

constexpr std::uint32_t kInfBits = 0x7f800000;
constexpr int kFirstNormal = -126;  // FP32's, as an exponent

int exponent_of(float magnitude) {
  const auto bits = std::bit_cast<std::uint32_t>(magnitude);
  // From the bits: where a thread flushes subnormals, arithmetic on them gives 0.
  return bits >> 23 ? static_cast<int>(bits >> 23) - 127
                    : TensorStats::kLeastExponent + std::bit_width(bits) - 1;
}

/// The bits behind the leading one, 23 of them.
std::uint32_t fraction_of(float magnitude) {
  const auto bits = std::bit_cast<std::uint32_t>(magnitude);
  return (bits >> 23 ? bits : bits << (24 - std::bit_width(bits))) & 0x7fffff;
}

const FractionCounts& fractions_at(const TensorStats& stats, int exponent) {
  static constexpr FractionCounts kNone;
  return exponent < TensorStats::kLeastExponent || exponent > TensorStats::kLargestExponent
             ? kNone
             : stats.fractions[exponent - TensorStats::kLeastExponent];
}

/// How many of a binade have so many ones behind the leading one.
std::int64_t with_ones(const FractionCounts& counts, int ones) {
  switch (ones) {
    case 1:
      return counts.ones_1;
    case 2:
      return counts.ones_2;
    case 3:
      return counts.ones_3;
    case 7:
      return counts.ones_7;
    case 10:
      return counts.ones_10;
    default:
      return 0;  // FP32's 23: its own subnormals have fewer bits
  }
}

/// Where `format` is in TensorStats::saturated; FP32, whose values all fit, has no place.
int saturation_index(const char* function, Format format) {
  switch (format) {
    case Format::FP32:
      return -1;
    case Format::BF16:
      return 0;
    case Format::FP16:
      return 1;
    case Format::E4M3:
      return 2;
    case Format::E5M2:
      return 3;
    case Format::E2M1:
      return 4;
    default:
      detail::throw_error(detail::concat("TensorStats::", function, ": there are no shares for ",
                                         traits(format).name,
                                         ". Ask for FP32, BF16, FP16, E4M3, E5M2 or E2M1."));
  }
}

/// After multiplication by 2^shift.
FormatShares shares(const TensorStats& stats, Format format, int shift, std::int64_t saturated) {
  if (stats.count == 0) return {};
  const FormatTraits& t = traits(format);
  const auto below = [&](int exponent) {
    std::int64_t found = 0;
    for (int e = TensorStats::kLeastExponent; e < std::min(exponent, TensorStats::kLargestExponent + 1); ++e)
      found += stats.in_binade(e);
    return found;
  };
  const int min_normal = 1 - t.bias - shift;
  // Half of the smallest subnormal is a tie between 0 and an odd number: it becomes 0.
  const int tie = min_normal - t.mantissa_bits - 1;
  const std::int64_t zero = below(tie) + fractions_at(stats, tie).powers_of_two;
  // From half a step below min_normal on, a value becomes min_normal; at the tie, too, because that is even.
  const std::int64_t to_min_normal = with_ones(fractions_at(stats, min_normal - 1), t.mantissa_bits);
  const std::int64_t subnormal = below(min_normal) - to_min_normal - zero;
  const auto share = [&](std::int64_t part) {
    return static_cast<double>(part) / static_cast<double>(stats.count);
  };
  return {.zero = share(zero),
          .subnormal = share(subnormal),
          .saturated = share(saturated),
          .non_finite = share(stats.nans + stats.infinities)};
}

/// The numbers of packed() before those of the binades, and those of one binade.
constexpr std::size_t kHeadNumbers = 11, kBinadeNumbers = 7;

}  // namespace

void TensorStats::merge(const TensorStats& other) {
  const auto add = [](auto& sums, const auto& addends) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += addends[i];
  };
  count += other.count;
  zeros += other.zeros;
  nans += other.nans;
  infinities += other.infinities;
  sum += other.sum;
  // As bits, for the sake of subnormals.
  amax = std::bit_cast<float>(
      std::max(std::bit_cast<std::uint32_t>(amax), std::bit_cast<std::uint32_t>(other.amax)));
  add(exponents, other.exponents);
  add(subnormals, other.subnormals);
  add(saturated, other.saturated);
  for (std::size_t i = 0; i < fractions.size(); ++i) {
    FractionCounts& ours = fractions[i];
    const FractionCounts& theirs = other.fractions[i];
    ours.powers_of_two += theirs.powers_of_two;
    ours.ones_1 += theirs.ones_1;
    ours.ones_2 += theirs.ones_2;
    ours.ones_3 += theirs.ones_3;
    ours.ones_7 += theirs.ones_7;
    ours.ones_10 += theirs.ones_10;
  }
}

double TensorStats::mean() const { return finite() == 0 ? 0 : sum / static_cast<double>(finite()); }

std::int64_t TensorStats::in_binade(int exponent) const {
  if (exponent < kLeastExponent || exponent > kLargestExponent) return 0;
  return exponent < kFirstNormal ? subnormals[exponent - kLeastExponent] : exponents[exponent + 127];
}

FormatShares TensorStats::in(Format format) const {
  const int index = saturation_index("in", format);
  return shares(*this, format, 0, index < 0 ? 0 : saturated[index]);
}

FormatShares TensorStats::in_scaled(Format format) const {
  saturation_index("in_scaled", format);
  if (std::bit_cast<std::uint32_t>(amax) == 0) return shares(*this, format, 0, 0);
  const auto max = static_cast<float>(traits(format).max);
  const bool over = fraction_of(amax) > fraction_of(max);
  return shares(*this, format, exponent_of(max) - exponent_of(amax) - int{over}, 0);
}

std::vector<std::int64_t> TensorStats::packed() const {
  int first = kLeastExponent, last = kLargestExponent;
  while (first <= last && in_binade(first) == 0) ++first;
  while (last > first && in_binade(last) == 0) --last;
  if (first > last) first = kLeastExponent, last = kLeastExponent - 1;  // no value
  std::vector<std::int64_t> numbers = {zeros, nans, infinities, std::bit_cast<std::int64_t>(sum),
                                       std::bit_cast<std::int32_t>(amax)};
  numbers.insert(numbers.end(), saturated.begin(), saturated.end());
  numbers.push_back(first);
  for (int e = first; e <= last; ++e) {
    const FractionCounts& f = fractions_at(*this, e);
    for (const std::int64_t number :
         {in_binade(e), f.powers_of_two, f.ones_1, f.ones_2, f.ones_3, f.ones_7, f.ones_10})
      numbers.push_back(number);
  }
  return numbers;
}

TensorStats TensorStats::unpacked(std::span<const std::int64_t> numbers) {
  const auto check = [](bool good, const char* what) {
    HALFSTEP_CHECK(good, "TensorStats::unpacked: ", what,
                   ". These are not numbers of TensorStats::packed().");
  };
  check(numbers.size() >= kHeadNumbers && (numbers.size() - kHeadNumbers) % kBinadeNumbers == 0,
        "the number of numbers is none that statistics have");
  // So that no sum of counts overflows.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 1024;
  const auto count_at = [&](std::size_t place) {
    check(numbers[place] >= 0 && numbers[place] <= kMost, "a count is negative or too large");
    return numbers[place];
  };
  TensorStats stats;
  stats.zeros = count_at(0);
  stats.nans = count_at(1);
  stats.infinities = count_at(2);
  stats.sum = std::bit_cast<double>(numbers[3]);
  check(std::isfinite(stats.sum), "the sum of finite values is not finite");
  check(numbers[4] >= 0 && numbers[4] < kInfBits, "the largest magnitude is not a finite number");
  stats.amax = std::bit_cast<float>(static_cast<std::int32_t>(numbers[4]));
  for (std::size_t i = 0; i < stats.saturated.size(); ++i) stats.saturated[i] = count_at(5 + i);
  stats.exponents[0] = stats.zeros;
  stats.exponents[255] = stats.nans + stats.infinities;
  stats.count = stats.exponents[0] + stats.exponents[255];

  const std::int64_t first = numbers[kHeadNumbers - 1];
  const auto binades = static_cast<std::int64_t>((numbers.size() - kHeadNumbers) / kBinadeNumbers);
  // As a difference: no sum of a number from a file may overflow.
  check(first >= kLeastExponent && first <= kLargestExponent && binades <= kLargestExponent - first + 1,
        "the exponents are outside FP32's");
  for (std::int64_t i = 0; i < binades; ++i) {
    const std::size_t at = kHeadNumbers + static_cast<std::size_t>(i) * kBinadeNumbers;
    const std::int64_t here = count_at(at);
    for (std::size_t k = 1; k < kBinadeNumbers; ++k)
      check(count_at(at + k) <= here, "a part of a binade is more than the whole");
    const auto exponent = static_cast<int>(first + i);
    stats.count += here;
    if (exponent < kFirstNormal) {
      stats.subnormals[exponent - kLeastExponent] = here;
      stats.exponents[0] += here;
    } else {
      stats.exponents[exponent + 127] = here;
    }
    stats.fractions[exponent - kLeastExponent] = {.powers_of_two = numbers[at + 1],
                                                  .ones_1 = numbers[at + 2],
                                                  .ones_2 = numbers[at + 3],
                                                  .ones_3 = numbers[at + 4],
                                                  .ones_7 = numbers[at + 5],
                                                  .ones_10 = numbers[at + 6]};
  }
  int largest = kLargestExponent;
  while (largest >= kLeastExponent && stats.in_binade(largest) == 0) --largest;
  check(numbers[4] == 0 ? largest < kLeastExponent : exponent_of(stats.amax) == largest,
        "the largest magnitude is not in the last binade that has values");
  for (const std::int64_t part : stats.saturated)
    check(part <= stats.finite(), "more values saturate than there are");
  return stats;
}

std::optional<ProductFormat> product_format(std::string_view compute, std::string_view role) {
  if (role == "update" || compute == "fp32" || compute == "tf32") return std::nullopt;
  if (compute == "bf16") return ProductFormat{.format = Format::BF16};
  if (compute == "fp16") return ProductFormat{.format = Format::FP16};
  const bool has_wide_gradients = compute == "fp8-delayed" || compute == "fp8-current";
  return ProductFormat{.format = compute == "nvfp4"                         ? Format::E2M1
                                 : has_wide_gradients && role == "gradient" ? Format::E5M2
                                                                            : Format::E4M3,
                       .scaled = true};
}

}  // namespace halfstep
