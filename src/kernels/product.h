// Products of BF16 matrices, with sums in FP32, rounded once: where the processor has AMX. Elsewhere
// KernelTable::product is null, and products are LibTorch's.
//
// The order in which an element is summed depends on the length of the sum alone, so that who computes which
// part of the result does not change a bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"

namespace halfstep {

/// As it lies in memory: rows of codes one behind the other, `row` codes apart. `is_transposed`: its columns
/// lie so.
struct ProductOperand {
  const std::uint16_t* codes = nullptr;
  std::size_t row = 0;
  bool is_transposed = false;
};

/// result[rows][columns] = left[rows][terms] * right[terms][columns] + bias[columns]
struct ProductCall {
  ProductOperand left, right;
  const std::uint16_t* bias = nullptr;  // none
  std::uint16_t* result = nullptr;
  std::size_t result_row = 0;
  std::size_t rows = 0, columns = 0, terms = 0;
};

/// Rows and columns of the result; the first of both are multiples of kProductBlock.
struct ProductPart {
  std::size_t first_row, rows, first_column, columns;
};

inline constexpr std::size_t kProductBlock = 32;

/// How many parts for how many threads: each thread makes its own copy of what it reads of the right operand.
std::size_t product_parts(const ProductCall& call, std::size_t threads);
ProductPart product_part(const ProductCall& call, std::size_t parts, std::size_t part);

/// `scratch` has table.product->bytes(call, part) bytes, aligned to 64.
void multiply(const ProductCall& call, const ProductPart& part, void* scratch,
              const KernelTable& table = kernels());

}  // namespace halfstep
