#include "kernels/cast.h"

#include <halfstep/error.h>

namespace halfstep {
namespace {

const FormatKernels& kernels_of_format(const KernelTable& table, Format format) {
  const FormatKernels& found = table.format[static_cast<int>(format)];
  HALFSTEP_CHECK(found.decode != nullptr, "cast: there is no array cast for ", traits(format).name,
                 ". FP32 needs none; E8M0 block scales are chosen by e8m0_floor or e8m0_ceil.");
  return found;
}

SpecialResults special_results(Format format, CastMode mode) {
  const FormatTraits& t = traits(format);
  const int unused_low_bits = t.bits - 1 - t.exponent_bits - t.mantissa_bits;
  const std::uint32_t max = t.max_code >> unused_low_bits;
  const std::uint32_t non_finite = (t.has_inf   ? t.inf_code
                                    : t.has_nan ? t.nan_code
                                                : t.max_code) >>
                                   unused_low_bits;
  // Toward zero nothing finite passes max (IEEE 754, 7.4).
  const bool stops_at_max = mode.overflow == Overflow::Saturate || mode.rounding == Rounding::TowardZero;
  return {.overflow = stops_at_max ? max : non_finite,
          .inf = mode.inf_input == InfInput::Saturate ? max : non_finite};
}

}  // namespace

std::size_t code_bytes(Format format) {
  const int bits = traits(format).bits;
  return bits <= 8 ? 1 : bits / 8;
}

void cast(std::span<const float> values, Format format, CastMode mode, void* codes,
          const KernelTable& table) {
  const FormatKernels& row = kernels_of_format(table, format);
  HALFSTEP_CHECK(mode.rounding != Rounding::Stochastic,
                 "cast: stochastic rounding needs a key; call cast_stochastic.");
  const CastKernel kernel = mode.rounding == Rounding::NearestEven ? row.nearest_even : row.toward_zero;
  kernel(values.data(), codes, values.size(), special_results(format, mode));
}

void cast_stochastic(std::span<const float> values, Format format, CastMode mode,
                     const StochasticStream& stream, void* codes, const KernelTable& table) {
  const FormatKernels& row = kernels_of_format(table, format);
  HALFSTEP_CHECK(mode.rounding == Rounding::Stochastic, "cast_stochastic: mode.rounding is not Stochastic.");
  row.stochastic(values.data(), codes, values.size(), special_results(format, mode), stream);
}

void decode(const void* codes, Format format, std::span<float> values, const KernelTable& table) {
  kernels_of_format(table, format).decode(codes, values.data(), values.size());
}

}  // namespace halfstep
