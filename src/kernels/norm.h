// Norms over rows. RMS norm: x / sqrt(mean(x^2) + eps) * gain. Layer norm: the same of the rows less their
// means, plus a bias.
#pragma once

#include <cstddef>

#include "kernels/dispatch.h"

namespace halfstep {

/// Rows that lie one behind the other, in BF16 or FP16.
struct NormInput {
  Format format;
  const void* values;
  std::size_t rows;
  std::size_t columns;
  const float* gain;            // of each column
  const float* bias = nullptr;  // of each column, for layer norm
};

/// In FP32, the sums in FP64: the same bits in every table and however rows are shared out, but for the sign
/// and payload of NaNs. The output is FP32, or rounded once to the input's format. `inverse` has one number
/// per row, 1 / sqrt(...), which backward wants.
void norm(const NormInput& input, double eps, Format output_format, void* output, float* inverse,
          const KernelTable& table = kernels());

/// What backward makes. The gradients of the input are rounded once, to its format; those of the columns are
/// added to.
struct NormGrads {
  void* of_input;
  float* of_gain;
  float* of_bias = nullptr;  // of layer norm
};

/// `grads` are those of the output, in its format.
void norm_backward(const NormInput& input, const float* inverse, Format grad_format, const void* grads,
                   const NormGrads& made, const KernelTable& table = kernels());

}  // namespace halfstep
