// SwiGLU, GELU and rotary positions over arrays of BF16 or FP16: FP32 inside, each result rounded once, to
// the nearest even. Elements depend on no others, so that the bits are the same however arrays are shared
// out.
#pragma once

#include <cstddef>

#include "kernels/dispatch.h"

namespace halfstep {

/// output[i] = silu(gate[i]) * up[i], where silu(x) = x / (1 + e^-x).
void swiglu(Format format, const void* gate, const void* up, void* output, std::size_t count,
            const KernelTable& table = kernels());

/// From the output's gradient those of both inputs.
void swiglu_backward(Format format, const void* gate, const void* up, const void* grad, void* gate_grad,
                     void* up_grad, std::size_t count, const KernelTable& table = kernels());

/// output[i] = gelu(x[i]), the approximation of it by the tanh of a cubic.
void gelu(Format format, const void* x, void* output, std::size_t count,
          const KernelTable& table = kernels());

/// From the output's gradient the input's.
void gelu_backward(Format format, const void* x, const void* grad, void* x_grad, std::size_t count,
                   const KernelTable& table = kernels());

/// Rows of `columns` elements, an even number: element i of the first half and element i of the second are
/// one pair. Strides are in elements.
struct RotatedRows {
  Format format;
  const void* values;
  std::size_t stride;
  void* output;
  std::size_t output_stride;
  std::size_t rows;
  std::size_t columns;
};

/// Turns each pair (a, b) of every row by the same angles: a cos[i] - b sin[i], and
/// b cos[columns / 2 + i] + a sin[columns / 2 + i].
void rotate(const RotatedRows& rows, const float* cos, const float* sin,
            const KernelTable& table = kernels());

/// The gradient of rotate's input from that of its output.
void rotate_back(const RotatedRows& rows, const float* cos, const float* sin,
                 const KernelTable& table = kernels());

}  // namespace halfstep
