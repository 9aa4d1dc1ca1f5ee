#include "distributed/packed_weights.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "kernels/quantise.h"

namespace halfstep {
namespace {

constexpr QuantiseRule kRule{.codes = Format::E4M3, .block = {1, kPackedBlock}, .scale = ScaleRule::E8m0Ceil};
constexpr std::int64_t kTaskBlocks = 1024;

Format format_of(const at::Tensor& weights) {
  return weights.scalar_type() == at::kBFloat16 ? Format::BF16 : Format::FP32;
}

/// BF16 or FP32: what the kernels read and write.
bool kernels_take(const at::Tensor& weights) {
  return weights.scalar_type() == at::kBFloat16 || weights.scalar_type() == at::kFloat;
}

/// work(blocks of a task, as rows of a matrix)
template <typename Work>
void over_blocks(std::int64_t blocks, const Work& work) {
  at::parallel_for(0, blocks, kTaskBlocks, [&](std::int64_t begin, std::int64_t end) {
    work(Rectangle{.first_row = static_cast<std::size_t>(begin),
                   .rows = static_cast<std::size_t>(end - begin),
                   .first_column = 0,
                   .columns = kPackedBlock});
  });
}

}  // namespace

at::Tensor packed(const at::Tensor& weights) {
  const at::Tensor source = kernels_take(weights) ? weights : weights.to(at::kFloat);
  const std::int64_t blocks = source.numel() / kPackedBlock;
  const at::Tensor bytes = at::empty({packed_bytes(source.numel())}, at::kByte);
  auto* const codes = bytes.mutable_data_ptr<std::uint8_t>();
  const QuantiseInput input{.format = format_of(source),
                            .values = source.const_data_ptr(),
                            .rows = static_cast<std::size_t>(blocks),
                            .columns = kPackedBlock,
                            .row_stride = kPackedBlock};
  over_blocks(blocks, [&](const Rectangle& part) {
    QuantiseCounts ignored;
    quantise(input, kRule, part, codes, codes + source.numel(), ignored);
  });
  return bytes;
}

void unpack(const at::Tensor& bytes, const at::Tensor& weights) {
  const at::Tensor target = kernels_take(weights) ? weights : at::empty(weights.sizes(), at::kFloat);
  const std::int64_t blocks = weights.numel() / kPackedBlock;
  const auto* const codes = bytes.const_data_ptr<std::uint8_t>();
  over_blocks(blocks, [&](const Rectangle& part) {
    dequantise(codes, codes + weights.numel(), kRule, static_cast<std::size_t>(blocks), kPackedBlock, part,
               format_of(target), target.mutable_data_ptr());
  });
  if (!target.is_same(weights)) weights.copy_(target);
}

}  // namespace halfstep
