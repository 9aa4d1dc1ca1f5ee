#include <algorithm>

#include "kernels/tiles.h"

namespace halfstep {

double sum_of_squares(Format format, const void* grads, std::size_t count, const KernelTable& table) {
  double lanes[kSquareLanes] = {};
  table.update->sum_of_squares[grad_format_index(format)](grads, count, lanes);
  for (std::size_t half = kSquareLanes / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

void accumulate(Format grad, const void* grads, float* sum, std::size_t count, bool first,
                const KernelTable& table) {
  const UpdateStages& stages = *table.update;
  const int grad_index = grad_format_index(grad);
  if (first) {
    stages.load_grads[grad_index](grads, 1, sum, count);
  } else {
    stages.accumulate[grad_index](grads, sum, count);
  }
}

void accumulate_kahan(Format grad, const void* grads, std::uint16_t* sum_bf16,
                      std::uint16_t* compensation_bf16, std::size_t count, bool first,
                      const KernelTable& table) {
  const UpdateLayout as_weight{.working = Format::BF16, .weights = WeightStorage::Kahan};
  const int grad_index = grad_format_index(grad);
  WeightBuffers buffers;
  alignas(64) float before[kTileElements];
  for (std::size_t begin = 0; begin < count; begin += kTileElements) {
    const std::size_t tile_count = std::min(kTileElements, count - begin);
    std::uint16_t *sum = sum_bf16 + begin, *compensation = compensation_bf16 + begin;
    table.update->load_grads[grad_index](at_element(grads, grad, begin), 1, buffers.addend, tile_count);
    if (first) {
      store_weights(as_weight, buffers.addend, sum, compensation, tile_count, table);
      continue;
    }
    table.update->load_grads[kBf16Grads](sum, 1, before, tile_count);
    add_compensated(table, Format::BF16, before, buffers.addend, sum, compensation, tile_count, buffers);
  }
}

}  // namespace halfstep
