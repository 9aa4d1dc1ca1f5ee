// Weights on their way from rank to rank in fewer bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace halfstep {

/// Weights as MXFP8 has them, a code of E4M3 each and a power of two for every 32: 1.03 bytes. Blocks of 32
/// follow one another as the elements lie in memory, so that it is the same for any cut into runs of whole
/// blocks. A weight that is not finite makes a NaN of its block.
constexpr std::int64_t kPackedBlock = 32;
constexpr std::int64_t packed_bytes(std::int64_t elements) { return elements + elements / kPackedBlock; }

/// `weights` have one dimension and whole blocks; a new tensor of bytes.
at::Tensor packed(const at::Tensor& weights);
/// Exact: every value of the format is one of BF16 and of FP32; FP16 has a smaller range, and rounds below
/// it.
void unpack(const at::Tensor& bytes, const at::Tensor& weights);

}  // namespace halfstep
