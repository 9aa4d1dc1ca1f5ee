// RMS norm over rows: x / sqrt(mean(x^2) + eps) * gain.
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
  const float* gain;  // of each column
};

/// In FP32, the sums in FP64: the same bits in every table and however rows are shared out. `inverse_rms` has
/// one number a row, which backward wants.
void rms_norm(const NormInput& input, double eps, float* output, float* inverse_rms,
              const KernelTable& table = kernels());

/// `grads` are those of the output. Those of the input are rounded once, to the input's format; those of the
/// gain are added to `gain_grads`.
void rms_norm_backward(const NormInput& input, const float* inverse_rms, const float* grads,
                       void* input_grads, float* gain_grads, const KernelTable& table = kernels());

}  // namespace halfstep
