// The twin that the other tables must equal bit for bit, written for reading.
#include <algorithm>
#include <bit>

#include "formats/philox.h"
#include "kernels/cast_constants.h"
#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

/// All roundings are one addition: the value, in steps of the format's grid, is a 32.32 fixed-point number;
/// add what the rounding asks for to the 32 bits of fraction, and see whether it carries.
template <Format format, Rounding rounding>
Code<format> cast_one(std::uint32_t bits, SpecialResults special, std::uint32_t random) {
  constexpr CastConstants k = cast_constants(format);
  const std::uint32_t magnitude = bits & ~kFp32Sign;
  const std::uint32_t hidden_bit = magnitude < kFp32HiddenBit ? 0 : kFp32HiddenBit;
  const std::uint32_t significand = (magnitude & (kFp32HiddenBit - 1)) | hidden_bit;
  const std::uint32_t exponent = std::max(magnitude >> 23, 1u);

  // Below the format's first normal binade the grid stays as coarse as there.
  const std::uint32_t coarse_exponent = std::max(exponent, k.first_normal);
  const std::uint32_t shift = std::min(23u - k.mantissa_bits + (coarse_exponent - exponent), 63u);
  const std::uint64_t steps = (std::uint64_t{significand} << 32) >> shift;
  const std::uint32_t odd = (steps >> 32) & 1;
  const std::uint32_t addend = rounding == Rounding::NearestEven  ? 0x7fffffff + odd
                               : rounding == Rounding::Stochastic ? random
                                                                  : 0;
  const auto rounded = static_cast<std::uint32_t>((steps + addend) >> 32);
  std::uint32_t code = rounded + ((coarse_exponent - k.first_normal) << k.mantissa_bits);

  if (code > k.max_code) code = special.overflow;
  if (magnitude == kFp32Inf) code = special.inf;
  const bool nan = magnitude > kFp32Inf;
  if (nan) code = k.nan_code;

  bool signed_result = bits & kFp32Sign;
  if (k.minus_zero_is_nan && code == 0) signed_result = false;
  if (!k.has_nan && nan) signed_result = false;
  return static_cast<Code<format>>((code << k.unused_low_bits) |
                                   (std::uint32_t{signed_result} << k.sign_position));
}

template <Format format, Rounding rounding>
void cast(const float* values, void* codes, std::size_t count, SpecialResults special) {
  for (std::size_t i = 0; i < count; ++i)
    static_cast<Code<format>*>(codes)[i] =
        cast_one<format, rounding>(std::bit_cast<std::uint32_t>(values[i]), special, 0);
}

template <Format format>
void cast_stochastic(const float* values, void* codes, std::size_t count, SpecialResults special,
                     const StochasticStream& stream) {
  for (std::size_t i = 0; i < count; ++i)
    static_cast<Code<format>*>(codes)[i] = cast_one<format, Rounding::Stochastic>(
        std::bit_cast<std::uint32_t>(values[i]), special, random_bits(stream.key, stream.first_element + i));
}

void random(const StochasticStream& stream, std::uint32_t* words, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) words[i] = random_bits(stream.key, stream.first_element + i);
}

template <Format format>
std::uint32_t decode_one(std::uint32_t code) {
  constexpr CastConstants k = cast_constants(format);
  const std::uint32_t sign = (code >> k.sign_position) & 1 ? kFp32Sign : 0;
  const std::uint32_t magnitude = (code & ((1u << k.sign_position) - 1)) >> k.unused_low_bits;
  if (k.minus_zero_is_nan && magnitude == 0 && sign) return kFp32QuietNan;
  if (magnitude >= k.first_nan_magnitude) return kFp32QuietNan | sign;
  if (magnitude == k.inf_code) return kFp32Inf | sign;
  // FP32's own exponent: the code is the upper part of an FP32 word, subnormals included.
  if (k.bias == 127) return magnitude << (23 - k.mantissa_bits) | sign;
  // Exact, and no FP32 subnormal on either side of the product.
  if (magnitude >> k.mantissa_bits == 0)
    return std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * k.min_subnormal) | sign;
  return ((magnitude << (23 - k.mantissa_bits)) + ((127u - k.bias) << 23)) | sign;
}

template <Format format>
void decode(const void* codes, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    values[i] = std::bit_cast<float>(decode_one<format>(static_cast<const Code<format>*>(codes)[i]));
}

template <Format format>
constexpr FormatKernels kernels_of() {
  return {cast<format, Rounding::NearestEven>, cast<format, Rounding::TowardZero>, cast_stochastic<format>,
          decode<format>};
}

}  // namespace

constinit const KernelTable kScalarKernels = {
    .isa = "scalar",
    .format = {{},
               kernels_of<Format::TF32>(),
               kernels_of<Format::BF16>(),
               kernels_of<Format::FP16>(),
               kernels_of<Format::E4M3>(),
               kernels_of<Format::E5M2>(),
               kernels_of<Format::E4M3FNUZ>(),
               kernels_of<Format::E5M2FNUZ>(),
               {},
               kernels_of<Format::E2M1>()},
    .random = random,
    .update = &kScalarUpdateStages,
    .norm = &kScalarNormRows,
    .pointwise = &kScalarPointwise,
    .quantise = &kScalarQuantiseRows,
    .statistics = &kScalarStatistics,
    .attention = &kScalarAttention,
};

}  // namespace halfstep
