#include "kernels/product.h"

#include <algorithm>

namespace halfstep {
namespace {

std::size_t blocks_of(std::size_t count) { return (count + kProductBlock - 1) / kProductBlock; }

/// Both operands are copied of a transposed left one: each thread has a share of the larger, and all of the
/// smaller. Else the right one is, by the columns: who has its own columns copies nothing that others copy
/// too.
bool is_divided_by_rows(const ProductCall& call, std::size_t threads) {
  const std::size_t rows = blocks_of(call.rows), columns = blocks_of(call.columns);
  if (call.left.is_transposed) return rows >= columns;
  return rows > columns && (columns < threads || columns % threads != 0);
}

}  // namespace

std::size_t product_parts(const ProductCall& call, std::size_t threads) {
  return std::min(threads, blocks_of(is_divided_by_rows(call, threads) ? call.rows : call.columns));
}

ProductPart product_part(const ProductCall& call, std::size_t parts, std::size_t part) {
  const bool by_rows = is_divided_by_rows(call, parts);
  const std::size_t all = by_rows ? call.rows : call.columns, blocks = blocks_of(all);
  const std::size_t first = blocks * part / parts * kProductBlock,
                    end = std::min(all, blocks * (part + 1) / parts * kProductBlock);
  if (by_rows) return {.first_row = first, .rows = end - first, .first_column = 0, .columns = call.columns};
  return {.first_row = 0, .rows = call.rows, .first_column = first, .columns = end - first};
}

void multiply(const ProductCall& call, const ProductPart& part, void* scratch, const KernelTable& table) {
  table.product->multiply(call, part, scratch);
}

}  // namespace halfstep
