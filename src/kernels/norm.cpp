#include "kernels/norm.h"

#include <cmath>
#include <vector>

#include "kernels/cast.h"
#include "kernels/tiles.h"

namespace halfstep {
namespace {

void load_row(const NormInput& input, std::size_t row, float* values, const KernelTable& table) {
  const void* codes = at_element(input.values, input.format, row * input.columns);
  table.update->load_grads[grad_format_index(input.format)](codes, 1, values, input.columns);
}

void store_row(const NormInput& input, std::size_t row, const std::vector<float>& values, void* array,
               const KernelTable& table) {
  void* codes = static_cast<std::uint16_t*>(array) + row * input.columns;
  if (input.format == Format::BF16) {
    table.update->round_bf16(values.data(), static_cast<std::uint16_t*>(codes), values.size());
  } else {
    cast(values, input.format, {.overflow = Overflow::NonFinite}, codes, table);
  }
}

}  // namespace

void rms_norm(const NormInput& input, double eps, float* output, float* inverse_rms,
              const KernelTable& table) {
  const std::size_t columns = input.columns;
  std::vector<float> values(columns);
  for (std::size_t row = 0; row < input.rows; ++row) {
    load_row(input, row, values.data(), table);
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
    load_row(input, row, values.data(), table);
    const float factor = inverse_rms[row];
    const double dot = table.norm->dot(values.data(), grads, input.gain, columns);
    const auto along = static_cast<float>(dot * factor / static_cast<double>(columns));
    table.norm->backward(values.data(), grads, input.gain, factor, along, value_grads.data(), gain_grads,
                         columns);
    store_row(input, row, value_grads, input_grads, table);
  }
}

}  // namespace halfstep
