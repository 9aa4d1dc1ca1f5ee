// RMS norm over rows of raw arrays.
#include "kernels/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/optimizer_state.h"

namespace halfstep {
namespace {

using namespace testing_state;

constexpr Format kRowFormats[] = {Format::BF16, Format::FP16};
constexpr double kEps = 1e-5;

/// Rows, gains and the gradients of the output; and what the kernels make of them.
struct Case {
  Format format;
  std::size_t rows, columns;
  Array values;
  std::vector<float> gain, grads;

  std::vector<float> output, inverse_rms, gain_grads;
  Array value_grads;

  Case(Format format, std::size_t rows, std::size_t columns, Values kind)
      : format(format),
        rows(rows),
        columns(columns),
        values(bytes_of(format), rows * columns, columns % 4),
        gain(random_values(Values::Ordinary, columns, 1)),
        grads(random_values(Values::Ordinary, rows * columns, 2)),
        output(rows * columns),
        inverse_rms(rows),
        gain_grads(columns, 0.5F),
        value_grads(bytes_of(format), rows * columns, columns % 4) {
    const std::vector<float> drawn = random_values(kind, rows * columns, 3);
    for (std::size_t i = 0; i < drawn.size(); ++i) values.set(i, code_of(drawn[i], format));
  }

  NormInput input() { return {format, values.at(0), rows, columns, gain.data()}; }

  void run(const KernelTable& table = kernels()) {
    rms_norm(input(), kEps, output.data(), inverse_rms.data(), table);
    rms_norm_backward(input(), inverse_rms.data(), grads.data(), value_grads.at(0), gain_grads.data(), table);
  }

  long double value(std::size_t row, std::size_t column) {
    return value_of(values.code(row * columns + column), format);
  }
};

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void expect_same(Case& one, Case& other, const std::string& what) {
  for (std::size_t i = 0; i < one.output.size(); ++i) {
    ASSERT_TRUE(same(one.output[i], other.output[i])) << what << " output " << i;
    const float a = value_of(one.value_grads.code(i), one.format),
                b = value_of(other.value_grads.code(i), one.format);
    ASSERT_TRUE(same(a, b)) << what << " gradient " << i;
  }
  for (std::size_t i = 0; i < one.columns; ++i)
    ASSERT_TRUE(same(one.gain_grads[i], other.gain_grads[i])) << what << " gain " << i;
}

TEST(RmsNorm, HasTheSameBitsInEveryTable) {
  for (Format format : kRowFormats)
    for (Values kind : kValues)
      for (std::size_t columns : {1, 15, 16, 17, 33, 576}) {
        Case twin(format, 3, columns, kind);
        twin.run(kScalarKernels);
        for (const KernelTable* table : available_kernels()) {
          Case here(format, 3, columns, kind);
          here.run(*table);
          ASSERT_TRUE(here.value_grads.guards_hold());
          expect_same(here, twin, std::string(table->isa) + " " + std::string(traits(format).name));
        }
      }
}

// u = 2^-24. inverse_rms is one rounding of an FP64 number, the output two products more: (1 + u)^3. Of the
// gradients, dot has FP64's error only; n, its product with `along` (rounded once), the product of gradient
// and gain, their difference and the last product are seven roundings of numbers no larger than the two
// terms. Then the one rounding to the format, of half a unit in its last place.
TEST(RmsNorm, IsWithinItsRoundingsOfTheDefinition) {
  constexpr long double u = 0x1p-24L;
  for (Format format : kRowFormats) {
    Case c(format, 5, 577, Values::Ordinary);
    c.run();
    std::vector<long double> gain_grads(c.columns, 0.5L), gain_sizes(c.columns, 0.5L);
    for (std::size_t row = 0; row < c.rows; ++row) {
      long double squares = 0, dot = 0;
      for (std::size_t i = 0; i < c.columns; ++i) {
        const long double x = c.value(row, i);
        squares += x * x;
        dot += x * c.grads[row * c.columns + i] * c.gain[i];
      }
      const long double factor = 1 / std::sqrt(squares / c.columns + kEps), along = dot * factor / c.columns;
      for (std::size_t i = 0; i < c.columns; ++i) {
        const std::size_t at = row * c.columns + i;
        const long double n = c.value(row, i) * factor, g = c.grads[at];
        const long double output = n * c.gain[i];
        ASSERT_LE(std::abs(c.output[at] - output), 4 * u * std::abs(output)) << row << ", " << i;
        const long double terms = factor * (std::abs(g * c.gain[i]) + std::abs(n * along));
        const long double grad = factor * (g * c.gain[i] - n * along);
        const long double half_unit =
            std::max(std::abs(grad) * std::exp2(-(traits(format).mantissa_bits + 1.0L)), 0x1p-25L);
        ASSERT_LE(std::abs(value_of(c.value_grads.code(at), format) - grad),
                  8 * u * terms + half_unit * 1.01L)
            << row << ", " << i;
        gain_grads[i] += g * n;
        gain_sizes[i] += std::abs(g * n);
      }
    }
    for (std::size_t i = 0; i < c.columns; ++i)
      ASSERT_LE(std::abs(c.gain_grads[i] - gain_grads[i]), (3 + 5) * u * gain_sizes[i]) << i;
  }
}

// Squares of large BF16 numbers leave FP32's range, and not FP64's.
TEST(RmsNorm, LargeRowsDoNotOverflow) {
  Case c(Format::BF16, 1, 64, Values::Ordinary);
  for (std::size_t i = 0; i < c.columns; ++i) c.values.set(i, code_of(i % 2 ? 1e30F : -1e30F, Format::BF16));
  c.run();
  for (std::size_t i = 0; i < c.columns; ++i)
    EXPECT_NEAR(c.output[i], (i % 2 ? 1 : -1) * c.gain[i], 1e-6 * std::abs(c.gain[i]));
}

TEST(RmsNorm, ANonFiniteElementMakesItsRowAloneNaN) {
  for (Format format : kRowFormats)
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Case c(format, 3, 40, Values::Ordinary);
      c.values.set(c.columns + 7, code_of(bad, format));
      c.run();
      EXPECT_TRUE(std::isnan(c.output[c.columns + 7]));
      for (std::size_t i = 0; i < c.columns; ++i) {
        EXPECT_TRUE(std::isfinite(c.output[i]));
        EXPECT_TRUE(std::isfinite(c.output[2 * c.columns + i]));
      }
    }
}

TEST(RmsNorm, AGradientBeyondFp16BecomesInfinite) {
  Case c(Format::FP16, 1, 32, Values::Ordinary);
  for (float& grad : c.grads) grad *= 1e8F;
  c.run();
  std::size_t infinite = 0;
  for (std::size_t i = 0; i < c.columns; ++i)
    infinite += std::isinf(value_of(c.value_grads.code(i), c.format)) ? 1 : 0;
  EXPECT_GT(infinite, 0U);
}

}  // namespace
}  // namespace halfstep
