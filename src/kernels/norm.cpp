#include "kernels/norm.h"

#include <cmath>
#include <vector>

#include "kernels/low_values.h"

namespace halfstep {
namespace {

// One sum or difference an element, for the compiler to make vectors of: the same bits in every ISA.
void add(const float* __restrict terms, float* __restrict sums, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sums[i] += terms[i];
}
void subtract(float what, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] -= what;
}

/// FP32 rows as the loops take them: loaded if they are low, and for layer norm less their means.
class Rows {
 public:
  Rows(const NormInput& input, const KernelTable& table)
      : input_(input),
        table_(table),
        values_(input.columns),
        ones_(input.bias == nullptr ? 0 : input.columns, 1.0F) {}

  float* load(std::size_t row) {
    load_low(table_, input_.format, at_low(input_.values, row * input_.columns), values_.data(),
             input_.columns);
    if (input_.bias != nullptr)
      subtract(mean_of_products(values_.data(), ones_.data()), values_.data(), input_.columns);
    return values_.data();
  }

  /// For layer norm: of one row of numbers times another.
  float mean_of_products(const float* one, const float* other) const {
    const double sum = table_.norm->dot(one, other, ones_.data(), input_.columns);
    return static_cast<float>(sum / static_cast<double>(input_.columns));
  }

 private:
  const NormInput& input_;
  const KernelTable& table_;
  std::vector<float> values_, ones_;
};

}  // namespace

void norm(const NormInput& input, double eps, Format output_format, void* output, float* inverse,
          const KernelTable& table) {
  const std::size_t columns = input.columns;
  Rows rows(input, table);
  std::vector<float> low(output_format == Format::FP32 ? 0 : columns);
  for (std::size_t row = 0; row < input.rows; ++row) {
    const float* const values = rows.load(row);
    const double sum = sum_of_squares(Format::FP32, values, columns, table);
    inverse[row] = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(columns) + eps));
    float* const made = low.empty() ? static_cast<float*>(output) + row * columns : low.data();
    table.norm->scale(values, inverse[row], input.gain, made, columns);
    if (input.bias != nullptr) add(input.bias, made, columns);
    if (!low.empty()) store_low(table, output_format, made, at_low(output, row * columns), columns);
  }
}

void norm_backward(const NormInput& input, const float* inverse, Format grad_format, const void* grads,
                   const NormGrads& made, const KernelTable& table) {
  const std::size_t columns = input.columns;
  Rows rows(input, table);
  std::vector<float> value_grads(columns), low(grad_format == Format::FP32 ? 0 : columns);
  for (std::size_t row = 0; row < input.rows; ++row) {
    if (!low.empty()) load_low(table, grad_format, at_low(grads, row * columns), low.data(), columns);
    const float* const grad = low.empty() ? static_cast<const float*>(grads) + row * columns : low.data();
    const float* const values = rows.load(row);
    const float factor = inverse[row];
    const double dot = table.norm->dot(values, grad, input.gain, columns);
    const auto along = static_cast<float>(dot * factor / static_cast<double>(columns));
    table.norm->backward(values, grad, input.gain, factor, along, value_grads.data(), made.of_gain, columns);
    if (input.bias != nullptr) {
      subtract(factor * rows.mean_of_products(grad, input.gain), value_grads.data(), columns);
      add(grad, made.of_bias, columns);
    }
    store_low(table, input.format, value_grads.data(), at_low(made.of_input, row * columns), columns);
  }
}

}  // namespace halfstep
