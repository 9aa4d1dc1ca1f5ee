// Quantised matrices: codes of 8 or 4 bits, one to a byte, and the scales that blocks of them share.
//
// A value is multiplied in FP32 and rounded once, to nearest even. No code of a finite value is infinite:
// what lies above the format's max is held there and counted. (Decoded beside a power-of-two scale, what
// rounds up to 2^128 is infinite again, and seen.) What is not finite stays visible: as Inf or NaN in a
// format that has them, else in the scale of its block.
#pragma once

#include <halfstep/recipe.h>

#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"

namespace halfstep {

/// A matrix in FP32 or BF16 whose rows lie `row_stride` elements apart.
struct QuantiseInput {
  Format format;
  const void* values;
  std::size_t rows;
  std::size_t columns;
  std::size_t row_stride;
};

/// How many rows and columns share a scale.
struct BlockShape {
  std::size_t rows;
  std::size_t columns;
};

/// Bytes that one stored scale takes: 4, or 1 for E8m0 and E4m3.
std::size_t scale_bytes(ScaleRule rule);

/// What a block is multiplied by on its way in, and on its way out.
struct BlockScale {
  float encode;
  float decode;          // without the tensor's scale
  std::uint32_t stored;  // bits of `decode` for the FP32 rules, else a code
};

/// `magnitude` is the largest of |values| as FP32 bits. `tensor_scale` matters to E4m3 alone.
BlockScale block_scale(std::uint32_t magnitude, Format codes, ScaleRule rule, float tensor_scale);

/// `decode` of a stored scale.
float decoded_scale(const void* scales, ScaleRule rule, std::size_t block);

/// What a whole tensor is divided by under E4m3, so that its largest block scale is E4M3's max.
float nvfp4_tensor_scale(std::uint32_t magnitude);

struct QuantiseRule {
  Format codes;  // E4M3, E5M2 or E2M1
  BlockShape block;
  ScaleRule scale;
  float tensor_scale = 1;
};

/// Of what became codes.
struct QuantiseCounts {
  std::uint64_t saturated = 0;  // finite, and held at max
  std::uint64_t vanished = 0;   // not zero, with the code of zero
  std::uint32_t largest = 0;    // magnitude, as FP32 bits
};

/// A part of the matrix that is made of whole blocks.
struct Rectangle {
  std::size_t first_row, rows;
  std::size_t first_column, columns;
};

/// Writes codes and scales of `part`. Both arrays are those of the whole matrix, row by row and without gaps;
/// a block at the edge may be smaller. With `stochastic`, element i of the matrix takes the random bits of
/// element i of the stream.
void quantise(const QuantiseInput& input, const QuantiseRule& rule, const Rectangle& part,
              std::uint8_t* codes, void* scales, QuantiseCounts& counts,
              const StochasticStream* stochastic = nullptr, const KernelTable& table = kernels());

/// The same with a scale that is known already, one for all.
void quantise_scaled(const QuantiseInput& input, Format codes_format, float encode, const Rectangle& part,
                     std::uint8_t* codes, QuantiseCounts& counts,
                     const StochasticStream* stochastic = nullptr, const KernelTable& table = kernels());

/// The largest magnitude of a part, as FP32 bits: at least 0x7f800000 where it is not finite.
std::uint32_t largest_magnitude(const QuantiseInput& input, const Rectangle& part,
                                const KernelTable& table = kernels());

/// Codes back to values, multiplied by the scales of their blocks but not by the tensor's. Into FP32, or into
/// BF16, in which every code is exact beside a scale that is a power of two or E4M3. With no scales: the
/// codes' own values.
void dequantise(const std::uint8_t* codes, const void* scales, const QuantiseRule& rule, std::size_t rows,
                std::size_t columns, const Rectangle& part, Format output_format, void* output,
                const KernelTable& table = kernels());

}  // namespace halfstep
