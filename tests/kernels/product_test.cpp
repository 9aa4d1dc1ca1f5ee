// Products of BF16 matrices over raw arrays, by tiles and by imitated ones, against FP64.
#include "kernels/product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/cpu_features.h"

namespace halfstep {

/// src/kernels/product_amx.cpp, compiled for tiles that tests/kernels/emulated/kernels/amx_tiles.h imitates.
extern const ProductLoops kEmulatedAmxProduct;

namespace {

float value_of(std::uint16_t code) { return std::bit_cast<float>(std::uint32_t{code} << 16); }
std::uint16_t code_of(float value) {  // of finite values
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// With some codes between the rows, which nothing may read as part of a sum, or write to.
class Matrix {
 public:
  Matrix(std::size_t rows, std::size_t columns, bool is_transposed, std::size_t gap)
      : is_transposed_(is_transposed), row_((is_transposed ? rows : columns) + gap) {
    codes_.assign((is_transposed ? columns : rows) * row_, kGap);
    rows_ = rows, columns_ = columns;
  }

  void draw(std::mt19937& generator) {
    std::normal_distribution<float> normal;
    for (std::size_t r = 0; r < rows_; ++r)
      for (std::size_t c = 0; c < columns_; ++c) at(r, c) = code_of(normal(generator));
  }
  std::uint16_t& at(std::size_t row, std::size_t column) {
    return is_transposed_ ? codes_[column * row_ + row] : codes_[row * row_ + column];
  }
  bool gaps_are_whole() {
    const std::size_t length = is_transposed_ ? rows_ : columns_;
    for (std::size_t i = 0; i < codes_.size(); ++i)
      if (i % row_ >= length && codes_[i] != kGap) return false;
    return true;
  }
  ProductOperand operand() const { return {codes_.data(), row_, is_transposed_}; }
  std::uint16_t* codes() { return codes_.data(); }
  std::size_t row() const { return row_; }

 private:
  static constexpr std::uint16_t kGap = 0x7fc1;  // a NaN
  bool is_transposed_;
  std::size_t rows_ = 0, columns_ = 0, row_;
  std::vector<std::uint16_t> codes_;
};

struct Sizes {
  std::size_t rows, columns, terms;
};

std::vector<KernelTable> tables_with_products() {
  KernelTable imitated = kScalarKernels;
  std::vector<KernelTable> found;
  if (cpu_features().avx512) {
    imitated.isa = "imitated tiles";
    imitated.product = &kEmulatedAmxProduct;
    found.push_back(imitated);
  }
  for (const KernelTable* table : available_kernels())
    if (table->product) found.push_back(*table);
  return found;
}

void multiply_in_parts(const ProductCall& call, std::size_t threads, const KernelTable& table) {
  const std::size_t parts = product_parts(call, threads);
  for (std::size_t i = 0; i < parts; ++i) {
    const ProductPart part = product_part(call, parts, i);
    const std::unique_ptr<void, decltype(&std::free)> scratch(
        std::aligned_alloc(64, table.product->bytes(call, part)), std::free);
    multiply(call, part, scratch.get(), table);
  }
}

// The sum of n exact products in FP32, in any order, is within n 2^-24 of the sum of their magnitudes, and
// tiles take subnormal numbers for zeros; one rounding to BF16 follows, of half a unit: 2^-8.
void expect_exact(const Sizes& sizes, bool left_across, bool right_across, bool has_bias,
                  const KernelTable& table, std::size_t threads) {
  SCOPED_TRACE(std::string(table.isa) + ": " + std::to_string(sizes.rows) + " x " +
               std::to_string(sizes.columns) + " x " + std::to_string(sizes.terms) +
               (left_across ? ", left across" : "") + (right_across ? ", right across" : ""));
  std::mt19937 generator(7);
  Matrix left(sizes.rows, sizes.terms, left_across, 3), right(sizes.terms, sizes.columns, right_across, 5),
      result(sizes.rows, sizes.columns, false, 2), bias(1, sizes.columns, false, 0);
  left.draw(generator);
  right.draw(generator);
  bias.draw(generator);
  const ProductCall call{.left = left.operand(),
                         .right = right.operand(),
                         .bias = has_bias ? bias.codes() : nullptr,
                         .result = result.codes(),
                         .result_row = result.row(),
                         .rows = sizes.rows,
                         .columns = sizes.columns,
                         .terms = sizes.terms};
  multiply_in_parts(call, threads, table);
  EXPECT_TRUE(result.gaps_are_whole());
  double worst = 0;
  for (std::size_t r = 0; r < sizes.rows; ++r)
    for (std::size_t c = 0; c < sizes.columns; ++c) {
      double sum = has_bias ? value_of(bias.at(0, c)) : 0.0, magnitude = std::abs(sum);
      for (std::size_t k = 0; k < sizes.terms; ++k) {
        const double product = double{value_of(left.at(r, k))} * value_of(right.at(k, c));
        sum += product;
        magnitude += std::abs(product);
      }
      const double bound =
          std::abs(sum) * 0x1p-8 + magnitude * static_cast<double>(sizes.terms + 1) * 0x1p-24 * 1.01;
      worst = std::max(worst, std::abs(value_of(result.at(r, c)) - sum) / bound);
    }
  EXPECT_LE(worst, 1.0);
}

TEST(Product, IsFp64sRoundedOnce) {
  const Sizes whole[] = {{64, 96, 64}, {288, 32, 32}};
  const Sizes ragged[] = {{33, 47, 61}, {1, 5, 2}, {300, 17, 70}, {40, 64, 33}};
  for (const KernelTable& table : tables_with_products())
    for (const auto& list : {std::span<const Sizes>(whole), std::span<const Sizes>(ragged)})
      for (const Sizes& sizes : list)
        for (const bool left : {false, true})
          for (const bool right : {false, true})
            expect_exact(sizes, left, right, /*has_bias=*/left == right, table, 1 + sizes.columns % 3);
}

TEST(Product, LongSumsArePutAside) {
  for (const KernelTable& table : tables_with_products())
    for (const bool across : {false, true}) expect_exact({40, 35, 5003}, across, !across, true, table, 2);
}

TEST(Product, MoreColumnsThanPanelsHold) {
  for (const KernelTable& table : tables_with_products()) {
    if (table.product == &kEmulatedAmxProduct) continue;  // takes seconds
    expect_exact({70, 1100, 1088}, false, true, false, table, 1);
    expect_exact({4130, 40, 3200}, false, false, false, table, 1);
  }
}

TEST(Product, HasTheSameBitsInAnyNumberOfParts) {
  for (const KernelTable& table : tables_with_products())
    for (const Sizes& sizes : {Sizes{130, 100, 75}, Sizes{35, 300, 96}, Sizes{300, 35, 4200}})
      for (const bool across : {false, true}) {
        if (table.product == &kEmulatedAmxProduct && sizes.terms > 4000) continue;
        std::mt19937 generator(3);
        Matrix left(sizes.rows, sizes.terms, across, 0), right(sizes.terms, sizes.columns, across, 0);
        left.draw(generator);
        right.draw(generator);
        std::vector<std::uint16_t> first;
        for (const std::size_t threads : {1, 2, 3, 16}) {
          std::vector<std::uint16_t> result(sizes.rows * sizes.columns);
          multiply_in_parts({.left = left.operand(),
                             .right = right.operand(),
                             .result = result.data(),
                             .result_row = sizes.columns,
                             .rows = sizes.rows,
                             .columns = sizes.columns,
                             .terms = sizes.terms},
                            threads, table);
          if (first.empty()) first = result;
          EXPECT_EQ(result, first) << threads << " threads, " << table.isa;
        }
      }
}

TEST(Product, HasAPartForEachThreadWhereItHasSoManyBlocks) {
  const auto parts = [](std::size_t rows, std::size_t columns, std::size_t threads,
                        bool is_transposed = false) {
    return product_parts({.left = {.is_transposed = is_transposed},
                          .right = {},
                          .rows = rows,
                          .columns = columns,
                          .terms = 32},
                         threads);
  };
  EXPECT_EQ(parts(32, 1024, 64), 32u);
  EXPECT_EQ(parts(32, 768, 32), 24u);
  EXPECT_EQ(parts(64, 992, 32), 31u);
  EXPECT_EQ(parts(992, 64, 32), 31u);
  EXPECT_EQ(parts(1024, 576, 2), 2u);
  EXPECT_EQ(parts(1024, 32, 64, /*is_transposed=*/true), 32u);
  EXPECT_EQ(parts(32, 1024, 64, /*is_transposed=*/true), 32u);
  EXPECT_EQ(parts(1, 1, 8), 1u);
}

TEST(Product, ANaNReachesItsRowAndNoOther) {
  for (const KernelTable& table : tables_with_products()) {
    const Sizes sizes{50, 40, 70};
    std::mt19937 generator(5);
    Matrix left(sizes.rows, sizes.terms, false, 0), right(sizes.terms, sizes.columns, false, 0),
        result(sizes.rows, sizes.columns, false, 0);
    left.draw(generator);
    right.draw(generator);
    left.at(33, 69) = 0xffc1;
    left.at(2, 0) = 0x7f80;  // Inf
    multiply_in_parts({.left = left.operand(),
                       .right = right.operand(),
                       .result = result.codes(),
                       .result_row = result.row(),
                       .rows = sizes.rows,
                       .columns = sizes.columns,
                       .terms = sizes.terms},
                      1, table);
    for (std::size_t r = 0; r < sizes.rows; ++r)
      for (std::size_t c = 0; c < sizes.columns; ++c) {
        const float value = value_of(result.at(r, c));
        EXPECT_EQ(std::isnan(value), r == 33) << r << ", " << c;
        EXPECT_EQ(std::isinf(value), r == 2) << r << ", " << c;
      }
  }
}

}  // namespace
}  // namespace halfstep
