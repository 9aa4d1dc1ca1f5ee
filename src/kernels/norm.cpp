#include "kernels/norm.h"

#include <cmath>
#include <vector>

#include "kernels/low_values.h"

namespace halfstep {

void rms_norm(const NormInput& input, double eps, float* output, float* inverse_rms,
              const KernelTable& table) {
  const std::size_t columns = input.columns;
  std::vector<float> values(columns);
  for (std::size_t row = 0; row < input.rows; ++row) {
    load_low(table, input.format, at_low(input.values, row * columns), values.data(), columns);
    const double sum = sum_of_squares(Format::FP32, values.data(), columns, table);
    inverse_rms[row] = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(columns) + eps));
    table.norm->scale(values.data(), inverse_rms[row], input.gain, output + row * columns, columns);
  }
}

void rms_norm_backward(const NormInput& input, const float* inverse_rms, const float* grads,
                       void* input_grads, float* gain_grads, const KernelTable& table) {
  const std::size_t columns = input.columns;
  std::vector<float> values(columns), value_grads(columns);
  for (std::size_t row = 0; row < input.rows; ++row, grads += columns) {
    load_low(table, input.format, at_low(input.values, row * columns), values.data(), columns);
    const float factor = inverse_rms[row];
    const double dot = table.norm->dot(values.data(), grads, input.gain, columns);
    const auto along = static_cast<float>(dot * factor / static_cast<double>(columns));
    table.norm->backward(values.data(), grads, input.gain, factor, along, value_grads.data(), gain_grads,
                         columns);
    store_low(table, input.format, value_grads.data(), at_low(input_grads, row * columns), columns);
  }
}

}  // namespace halfstep
