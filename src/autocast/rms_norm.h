// RMS norm of BF16 or FP16 rows, computed in FP32 without an FP32 copy of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace halfstep {

/// The arguments of aten::rms_norm.
struct RmsNormArguments {
  at::Tensor input;
  std::vector<int64_t> normalized_shape;
  std::optional<at::Tensor> gain;
  std::optional<double> eps;
};

/// Dense rows of BF16 or FP16 on the CPU, normed over the last dimension.
bool takes_low_rows(const RmsNormArguments& arguments);

/// The FP32 output, as stock computes it from an FP32 copy, but with sums in FP64. One pass over the rows
/// where stock makes eight; backward keeps the rows as they are and one FP32 number a row, and rounds each
/// gradient once.
at::Tensor low_rows_rms_norm(const RmsNormArguments& arguments);

}  // namespace halfstep
