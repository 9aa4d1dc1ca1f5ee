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

}  // namespace halfstep
