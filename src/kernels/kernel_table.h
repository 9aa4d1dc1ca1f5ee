// The kernels as a table of function pointers over raw arrays, one table an ISA.
//
// Casts and random words are integer arithmetic, or floating-point arithmetic that is exact on normal
// numbers: the state of MXCSR (flush-to-zero, denormals-are-zero, rounding mode) does not change a bit of any
// result.
#pragma once

#include <halfstep/formats.h>

#include <cstddef>
#include <cstdint>

#include "kernels/norm_rows.h"
#include "kernels/update_stages.h"

namespace halfstep {

/// What an overflowing value and an infinite input become: codes without sign, before TF32's padding.
struct SpecialResults {
  std::uint32_t overflow = 0;
  std::uint32_t inf = 0;
};

/// Whose random bits to use: element i of the array is element first_element + i of the tensor.
struct StochasticStream {
  StochasticKey key;
  std::uint64_t first_element = 0;
};

// Arrays need no alignment beyond that of their elements. A code is stored in 1, 2 or 4 bytes, whichever
// holds it.
using CastKernel = void (*)(const float* values, void* codes, std::size_t count, SpecialResults special);
using StochasticCastKernel = void (*)(const float* values, void* codes, std::size_t count,
                                      SpecialResults special, const StochasticStream& stream);
using DecodeKernel = void (*)(const void* codes, float* values, std::size_t count);
using RandomKernel = void (*)(const StochasticStream& stream, std::uint32_t* words, std::size_t count);

struct FormatKernels {
  CastKernel nearest_even = nullptr;
  CastKernel toward_zero = nullptr;
  StochasticCastKernel stochastic = nullptr;
  DecodeKernel decode = nullptr;
};

struct KernelTable {
  const char* isa;                     // as HALFSTEP_ISA spells it
  FormatKernels format[kFormatCount];  // in the order of enum Format; FP32 and E8M0 have none
  RandomKernel random;                 // the words that stochastic casts use
  const UpdateStages* update;
  const NormRows* norm;
};

extern const KernelTable kScalarKernels;
extern const KernelTable kAvx2Kernels;    // run only where cpu_features().avx2
extern const KernelTable kAvx512Kernels;  // run only where cpu_features().avx512

}  // namespace halfstep
