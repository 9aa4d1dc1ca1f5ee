// Tensors as FP8 codes with one power of two for each 128 elements.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/formats.h>

namespace halfstep {

inline constexpr int64_t kFp8BlockElements = 128;

/// FP32, BF16 or FP16 elements in a row on a CPU to bytes: the codes, then one exponent (int8) a block, by
/// whose power of two the block was multiplied. Values are held at the format's max; what is not finite stays
/// so.
at::Tensor fp8_blocks(const at::Tensor& flat, Format format);

/// Back, into as many elements in a row. Exact, but for an FP16 or subnormal FP32 result that cannot hold it.
void decode_fp8_blocks(const at::Tensor& bytes, Format format, const at::Tensor& flat);

}  // namespace halfstep
