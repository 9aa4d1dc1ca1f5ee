// Casts of whole arrays: the way into the kernels for the rooms above.
#pragma once

#include <span>

#include "kernels/dispatch.h"

namespace halfstep {

/// Bytes that one code takes in an array: 1, 2 or 4. E2M1 is one code to a byte here; packing is for those
/// who lay out blocks.
std::size_t code_bytes(Format format);

/// FP32 to codes, for every format but FP32 and E8M0, which are refused; `mode.rounding` is not Stochastic.
/// `codes` has room for values.size() codes and does not overlap `values`.
void cast(std::span<const float> values, Format format, CastMode mode, void* codes,
          const KernelTable& table = kernels());

/// The same with stochastic rounding.
void cast_stochastic(std::span<const float> values, Format format, CastMode mode,
                     const StochasticStream& stream, void* codes, const KernelTable& table = kernels());

/// Codes to FP32, exact.
void decode(const void* codes, Format format, std::span<float> values, const KernelTable& table = kernels());

}  // namespace halfstep
