// RMS norm and layer norm over rows of raw arrays.
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
  std::vector<float> gain, bias, grads;

  std::vector<float> output, inverse, gain_grads, bias_grads;
  Array value_grads;

  Case(bool is_layer_norm, Format format, std::size_t rows, std::size_t columns, Values kind)
      : format(format),
        rows(rows),
        columns(columns),
        values(bytes_of(format), rows * columns, columns % 4),
        gain(random_values(Values::Ordinary, columns, 1)),
        bias(is_layer_norm ? random_values(Values::Ordinary, columns, 4) : std::vector<float>()),
        grads(random_values(Values::Ordinary, rows * columns, 2)),
        output(rows * columns),
        inverse(rows),
        gain_grads(columns, 0.5F),
        bias_grads(bias.size(), 0.5F),
        value_grads(bytes_of(format), rows * columns, columns % 4) {
    const std::vector<float> drawn = random_values(kind, rows * columns, 3);
    for (std::size_t i = 0; i < drawn.size(); ++i) values.set(i, code_of(drawn[i], format));
  }

  NormInput input() {
    return {format, values.at(0), rows, columns, gain.data(), bias.empty() ? nullptr : bias.data()};
  }
  NormGrads grads_made() { return {value_grads.at(0), gain_grads.data(), bias_grads.data()}; }

  void run(const KernelTable& table = kernels()) {
    norm(input(), kEps, Format::FP32, output.data(), inverse.data(), table);
    norm_backward(input(), inverse.data(), Format::FP32, grads.data(), grads_made(), table);
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
  for (std::size_t i = 0; i < one.bias_grads.size(); ++i)
    ASSERT_TRUE(same(one.bias_grads[i], other.bias_grads[i])) << what << " bias " << i;
}

TEST(Norm, HasTheSameBitsInEveryTable) {
  for (const bool is_layer_norm : {false, true})
    for (Format format : kRowFormats)
      for (Values kind : kValues)
        for (std::size_t columns : {1, 15, 16, 17, 33, 576}) {
          Case twin(is_layer_norm, format, 3, columns, kind);
          twin.run(kScalarKernels);
          for (const KernelTable* table : available_kernels()) {
            Case here(is_layer_norm, format, 3, columns, kind);
            here.run(*table);
            ASSERT_TRUE(here.value_grads.guards_hold());
            expect_same(here, twin, std::string(table->isa) + " " + std::string(traits(format).name));
          }
        }
}

TEST(Norm, InTheFormatOfItsRowsIsFp32sNormRounded) {
  for (Format format : kRowFormats)
    for (std::size_t columns : {1, 33, 576}) {
      const bool is_layer_norm = columns == 33;
      Case fp32(is_layer_norm, format, 3, columns, Values::Ordinary);
      Case low(is_layer_norm, format, 3, columns, Values::Ordinary);
      Array output(bytes_of(format), low.output.size(), columns % 4);
      Array grads(bytes_of(format), low.output.size(), columns % 4);
      for (std::size_t i = 0; i < low.output.size(); ++i) {
        grads.set(i, code_of(low.grads[i], format));
        fp32.grads[i] = value_of(grads.code(i), format);
      }
      fp32.run();
      norm(low.input(), kEps, format, output.at(0), low.inverse.data());
      norm_backward(low.input(), low.inverse.data(), format, grads.at(0), low.grads_made());
      ASSERT_TRUE(output.guards_hold());
      for (std::size_t i = 0; i < low.output.size(); ++i) {
        ASSERT_EQ(output.code(i), code_of(fp32.output[i], format)) << i;
        low.output[i] = fp32.output[i];
      }
      expect_same(low, fp32, std::string(traits(format).name));
    }
}

// u = 2^-24. inverse is one rounding of an FP64 number, the output two products more: (1 + u)^3. Of the
// gradients, dot has FP64's error only; n, its product with `along` (rounded once), the product of gradient
// and gain, their difference and the last product are seven roundings of numbers no larger than the two
// terms. Then the one rounding to the format, of half a unit in its last place.
TEST(RmsNorm, IsWithinItsRoundingsOfTheDefinition) {
  constexpr long double u = 0x1p-24L;
  for (Format format : kRowFormats) {
    Case c(false, format, 5, 577, Values::Ordinary);
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

// As above, and: the mean is one rounding of an FP64 sum, so that each number less the mean is off by u
// (|mean| + itself), and normed numbers by `shift` more; the mean of the gradients is one rounding and one
// product.
TEST(LayerNorm, IsWithinItsRoundingsOfTheDefinition) {
  constexpr long double u = 0x1p-24L;
  for (Format format : kRowFormats) {
    Case c(true, format, 5, 577, Values::Ordinary);
    c.run();
    std::vector<long double> gain_grads(c.columns, 0.5L), bias_grads(c.columns, 0.5L);
    std::vector<long double> gain_sizes(c.columns, 0.5L), bias_sizes(c.columns, 0.5L), shifts(c.columns, 0);
    for (std::size_t row = 0; row < c.rows; ++row) {
      long double sum = 0, squares = 0, dot = 0, of_normed = 0, sizes = 0;
      for (std::size_t i = 0; i < c.columns; ++i) sum += c.value(row, i);
      const long double mean = sum / c.columns;
      for (std::size_t i = 0; i < c.columns; ++i) {
        const long double x = c.value(row, i) - mean,
                          g = c.grads[row * c.columns + i] * (long double){c.gain[i]};
        squares += x * x;
        dot += x * g;
        of_normed += g / c.columns;
        sizes += std::abs(g) / c.columns;
      }
      const long double factor = 1 / std::sqrt(squares / c.columns + kEps), along = dot * factor / c.columns;
      const long double shift = 1.01L * u * std::abs(mean) * factor;
      for (std::size_t i = 0; i < c.columns; ++i) {
        const std::size_t at = row * c.columns + i;
        const long double n = (c.value(row, i) - mean) * factor, g = c.grads[at], scaled = g * c.gain[i];
        const long double output = n * c.gain[i] + c.bias[i];
        ASSERT_LE(std::abs(c.output[at] - output),
                  5 * u * std::abs(n * c.gain[i]) + u * std::abs(output) + shift * std::abs(c.gain[i]))
            << row << ", " << i;
        const long double grad = factor * (scaled - n * along - of_normed);
        const long double terms = factor * (std::abs(scaled) + std::abs(n * along) + sizes);
        const long double shifted = factor * shift * (std::abs(along) + std::abs(n) * sizes);
        const long double half_unit =
            std::max(std::abs(grad) * std::exp2(-(traits(format).mantissa_bits + 1.0L)), 0x1p-25L);
        ASSERT_LE(std::abs(value_of(c.value_grads.code(at), format) - grad),
                  10 * u * terms + shifted + half_unit * 1.01L)
            << row << ", " << i;
        gain_grads[i] += g * n;
        gain_sizes[i] += std::abs(g * n);
        bias_grads[i] += g;
        bias_sizes[i] += std::abs(g);
        shifts[i] += shift * std::abs(g);
      }
    }
    for (std::size_t i = 0; i < c.columns; ++i) {
      ASSERT_LE(std::abs(c.gain_grads[i] - gain_grads[i]), (4 + 5) * u * gain_sizes[i] + shifts[i]) << i;
      ASSERT_LE(std::abs(c.bias_grads[i] - bias_grads[i]), 5 * u * bias_sizes[i]) << i;
    }
  }
}

// Squares of large BF16 numbers leave FP32's range, and not FP64's.
TEST(RmsNorm, LargeRowsDoNotOverflow) {
  Case c(false, Format::BF16, 1, 64, Values::Ordinary);
  for (std::size_t i = 0; i < c.columns; ++i) c.values.set(i, code_of(i % 2 ? 1e30F : -1e30F, Format::BF16));
  c.run();
  for (std::size_t i = 0; i < c.columns; ++i)
    EXPECT_NEAR(c.output[i], (i % 2 ? 1 : -1) * c.gain[i], 1e-6 * std::abs(c.gain[i]));
}

TEST(RmsNorm, ANonFiniteElementMakesItsRowAloneNaN) {
  for (Format format : kRowFormats)
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Case c(false, format, 3, 40, Values::Ordinary);
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
  Case c(false, Format::FP16, 1, 32, Values::Ordinary);
  for (float& grad : c.grads) grad *= 1e8F;
  c.run();
  std::size_t infinite = 0;
  for (std::size_t i = 0; i < c.columns; ++i)
    infinite += std::isinf(value_of(c.value_grads.code(i), c.format)) ? 1 : 0;
  EXPECT_GT(infinite, 0U);
}

}  // namespace
}  // namespace halfstep
