#include "kernels/pointwise.h"

#include <algorithm>
#include <vector>

#include "kernels/low_values.h"

namespace halfstep {
namespace {

constexpr int kFp32 = 0, kBf16 = 1;  // indices of PointwiseLoops

// FP16 goes by way of FP32 arrays that stay in the first-level cache.
constexpr std::size_t kStaged = 1024;

template <typename Loop>
void rotate_rows(const RotatedRows& rows, const Loop& loop, const float* cos, const float* sin,
                 const KernelTable& table) {
  const std::size_t columns = rows.columns;
  if (rows.format == Format::BF16)
    return loop[kBf16](rows.values, rows.stride, rows.output, rows.output_stride, rows.rows, cos, sin,
                       columns / 2);
  std::vector<float> values(columns), turned(columns);
  for (std::size_t row = 0; row < rows.rows; ++row) {
    load_low(table, rows.format, at_low(rows.values, row * rows.stride), values.data(), columns);
    loop[kFp32](values.data(), columns, turned.data(), columns, 1, cos, sin, columns / 2);
    store_low(table, rows.format, turned.data(), at_low(rows.output, row * rows.output_stride), columns);
  }
}

}  // namespace

void swiglu(Format format, const void* gate, const void* up, void* output, std::size_t count,
            const KernelTable& table) {
  if (format == Format::BF16) return table.pointwise->swiglu[kBf16](gate, up, output, count);
  float gates[kStaged], ups[kStaged], outputs[kStaged];
  for (std::size_t i = 0; i < count; i += kStaged) {
    const std::size_t here = std::min(kStaged, count - i);
    load_low(table, format, at_low(gate, i), gates, here);
    load_low(table, format, at_low(up, i), ups, here);
    table.pointwise->swiglu[kFp32](gates, ups, outputs, here);
    store_low(table, format, outputs, at_low(output, i), here);
  }
}

void swiglu_backward(Format format, const void* gate, const void* up, const void* grad, void* gate_grad,
                     void* up_grad, std::size_t count, const KernelTable& table) {
  if (format == Format::BF16)
    return table.pointwise->swiglu_backward[kBf16](gate, up, grad, gate_grad, up_grad, count);
  float gates[kStaged], ups[kStaged], grads[kStaged], gate_grads[kStaged], up_grads[kStaged];
  for (std::size_t i = 0; i < count; i += kStaged) {
    const std::size_t here = std::min(kStaged, count - i);
    load_low(table, format, at_low(gate, i), gates, here);
    load_low(table, format, at_low(up, i), ups, here);
    load_low(table, format, at_low(grad, i), grads, here);
    table.pointwise->swiglu_backward[kFp32](gates, ups, grads, gate_grads, up_grads, here);
    store_low(table, format, gate_grads, at_low(gate_grad, i), here);
    store_low(table, format, up_grads, at_low(up_grad, i), here);
  }
}

void gelu(Format format, const void* x, void* output, std::size_t count, const KernelTable& table) {
  const auto& loop = table.pointwise->gelu;
  if (format == Format::BF16) return loop[kBf16](x, output, count);
  float values[kStaged], outputs[kStaged];
  for (std::size_t i = 0; i < count; i += kStaged) {
    const std::size_t here = std::min(kStaged, count - i);
    load_low(table, format, at_low(x, i), values, here);
    loop[kFp32](values, outputs, here);
    store_low(table, format, outputs, at_low(output, i), here);
  }
}

void gelu_backward(Format format, const void* x, const void* grad, void* x_grad, std::size_t count,
                   const KernelTable& table) {
  const auto& loop = table.pointwise->gelu_backward;
  if (format == Format::BF16) return loop[kBf16](x, grad, x_grad, count);
  float values[kStaged], grads[kStaged], value_grads[kStaged];
  for (std::size_t i = 0; i < count; i += kStaged) {
    const std::size_t here = std::min(kStaged, count - i);
    load_low(table, format, at_low(x, i), values, here);
    load_low(table, format, at_low(grad, i), grads, here);
    loop[kFp32](values, grads, value_grads, here);
    store_low(table, format, value_grads, at_low(x_grad, i), here);
  }
}

void rotate(const RotatedRows& rows, const float* cos, const float* sin, const KernelTable& table) {
  rotate_rows(rows, table.pointwise->rotate, cos, sin, table);
}

void rotate_back(const RotatedRows& rows, const float* cos, const float* sin, const KernelTable& table) {
  rotate_rows(rows, table.pointwise->rotate_back, cos, sin, table);
}

}  // namespace halfstep
