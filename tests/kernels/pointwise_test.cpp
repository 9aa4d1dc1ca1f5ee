// SwiGLU, GELU and rotary positions over raw arrays.
#include "kernels/pointwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "kernels/optimizer_state.h"

namespace halfstep {
namespace {

using namespace testing_state;

constexpr Format kLowFormats[] = {Format::BF16, Format::FP16};
constexpr long double u = 0x1p-24L;
constexpr float kInf = std::numeric_limits<float>::infinity();

Array low_array(Format format, const std::vector<float>& values) {
  Array array(bytes_of(format), values.size(), values.size() % 4);
  for (std::size_t i = 0; i < values.size(); ++i) array.set(i, code_of(values[i], format));
  return array;
}

Array random_array(Format format, Values kind, std::size_t count, std::uint32_t seed) {
  return low_array(format, random_values(kind, count, seed));
}

/// Half a unit of the format's last place, or of its smallest number.
long double half_unit(long double value, Format format) {
  const long double smallest = format == Format::FP16 ? 0x1p-25L : 0x1p-134L;
  return std::max(std::abs(value) * std::exp2(-(traits(format).mantissa_bits + 1.0L)), smallest);
}

void expect_same_bits(const Array& a, const Array& b, const std::string& what) {
  for (std::size_t i = 0; i < a.count; ++i) ASSERT_EQ(a.code(i), b.code(i)) << what << ", element " << i;
  ASSERT_TRUE(a.guards_hold() && b.guards_hold()) << what;
}

/// SwiGLU of arrays and what the kernels make of them.
struct Gated {
  Format format;
  Array gate, up, grad, output, gate_grad, up_grad;

  Gated(Format format, Array gate, Array up, Array grad)
      : format(format),
        gate(std::move(gate)),
        up(std::move(up)),
        grad(std::move(grad)),
        output(bytes_of(format), this->gate.count, 1),
        gate_grad(bytes_of(format), this->gate.count, 3),
        up_grad(bytes_of(format), this->gate.count, 2) {}

  static Gated random(Format format, Values kind, std::size_t count) {
    return {format, random_array(format, kind, count, 1), random_array(format, Values::Ordinary, count, 2),
            random_array(format, Values::Ordinary, count, 3)};
  }

  Gated& run(const KernelTable& table = kernels()) {
    swiglu(format, gate.at(0), up.at(0), output.at(0), gate.count, table);
    swiglu_backward(format, gate.at(0), up.at(0), grad.at(0), gate_grad.at(0), up_grad.at(0), gate.count,
                    table);
    return *this;
  }
};

TEST(Swiglu, HasTheSameBitsInEveryTable) {
  for (Format format : kLowFormats)
    for (Values kind : kValues)
      for (std::size_t count : {1, 15, 16, 17, 33, 1025, 3000}) {
        const Gated twin = Gated::random(format, kind, count).run(kScalarKernels);
        for (const KernelTable* table : available_kernels()) {
          const Gated here = Gated::random(format, kind, count).run(*table);
          const std::string what = std::string(table->isa) + " " + traits(format).name;
          expect_same_bits(here.output, twin.output, what);
          expect_same_bits(here.gate_grad, twin.gate_grad, what);
          expect_same_bits(here.up_grad, twin.up_grad, what);
        }
      }
}

// The kernel's e^x is off by 1.5 u of it, so 1 + e^x by 2.5 u, the quotient by 3.5 u, its product with `up`
// by 4.5 u: 5 u, and half a unit of the format. Backward, s = 1 / (1 + e^-x) is off by 3.5 u of it, and the
// gradient of `up` by 2 u more. 1 - s is off by 3.5 u s + u, whose product with x is added to 1:
// (4.5 |x| + 1.5 |1 + x (1 - s)|) u there, 7 u from s and three more products. Second-order terms: 1 %.
// Numbers below 2^-126 are rounded to multiples of 2^-149 in each of these steps.
TEST(Swiglu, IsWithinItsRoundingsOfTheDefinition) {
  for (Format format : kLowFormats)
    for (Values kind : {Values::Ordinary, Values::Mixed}) {
      const std::size_t count = 5000;
      Gated c = Gated::random(format, kind, count);
      for (std::size_t i = 0; i < 1000; ++i)  // where SiLU bends, and where it is nearly 0 or x
        c.gate.set(i, code_of(static_cast<float>(i) * 0.05F - 25, format));
      c.run();
      for (std::size_t i = 0; i < count; ++i) {
        const long double x = value_of(c.gate.code(i), format), up = value_of(c.up.code(i), format),
                          g = value_of(c.grad.code(i), format);
        if (std::abs(x) > 80) continue;  // there e^x leaves FP32: the next test
        const long double s = 1 / (1 + std::exp(-x)), bend = 1 + x * (1 - s);
        const auto expect_near = [&](const Array& made, long double exact, long double error) {
          ASSERT_LE(std::abs(value_of(made.code(i), format) - exact),
                    1.01L * (error + half_unit(exact, format)) + 8 * 0x1p-149L)
              << "gate " << double(x) << " up " << double(up) << " grad " << double(g);
        };
        expect_near(c.output, x * s * up, 5 * u * std::abs(x * s * up));
        expect_near(c.up_grad, g * x * s, 6 * u * std::abs(g * x * s));
        expect_near(c.gate_grad, g * up * s * bend,
                    std::abs(g * up * s) * u * (4.5L * std::abs(x) + 8.5L * std::abs(bend)));
      }
    }
}

TEST(Swiglu, FarFromZeroTheGateIsShutOrOpen) {
  for (Format format : kLowFormats) {
    const std::vector<float> gates = {-60000, -1000, -100, -89, 89, 100, 1000, 60000};
    const std::vector<float> twos(gates.size(), 2);
    Gated c(format, low_array(format, gates), low_array(format, twos), low_array(format, twos));
    c.run();
    for (std::size_t i = 0; i < gates.size(); ++i) {
      const auto value = [&](const Array& made) { return value_of(made.code(i), format); };
      if (gates[i] < 0) {
        for (const Array* made : {&c.output, &c.gate_grad, &c.up_grad}) EXPECT_EQ(value(*made), 0);
      } else {
        const double twice = value_of(code_of(static_cast<float>(2 * value(c.gate)), format), format);
        EXPECT_EQ(value(c.output), twice) << gates[i];
        EXPECT_EQ(value(c.up_grad), twice) << gates[i];
        EXPECT_EQ(value(c.gate_grad), 4) << gates[i];
      }
    }
  }
}

TEST(Swiglu, ANaNStaysWhereItIs) {
  for (Format format : kLowFormats) {
    std::vector<float> values(40, 1);
    values[17] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> ones(40, 1);
    for (int which = 0; which < 2; ++which) {
      Gated c(format, low_array(format, which == 0 ? values : ones),
              low_array(format, which == 1 ? values : ones), low_array(format, ones));
      c.run();
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(std::isnan(value_of(c.output.code(i), format)), i == 17);
        EXPECT_EQ(std::isnan(value_of(c.gate_grad.code(i), format)), i == 17);
      }
    }
  }
}

TEST(Swiglu, AProductBeyondFp16BecomesInfinite) {
  const std::vector<float> gate = {1000, 1}, up = {1000, 1};
  Gated c(Format::FP16, low_array(Format::FP16, gate), low_array(Format::FP16, up),
          low_array(Format::FP16, gate));
  c.run();
  EXPECT_EQ(value_of(c.output.code(0), Format::FP16), kInf);
  EXPECT_EQ(value_of(c.up_grad.code(0), Format::FP16), kInf);
  EXPECT_LT(value_of(c.output.code(1), Format::FP16), 1);
}

/// GELU of an array and what the kernels make of it.
struct Passed {
  Format format;
  Array x, grad, output, x_grad;

  Passed(Format format, Array values, Array grads)
      : format(format),
        x(std::move(values)),
        grad(std::move(grads)),
        output(bytes_of(format), x.count, 1),
        x_grad(bytes_of(format), x.count, 3) {}

  static Passed random(Format format, Values kind, std::size_t count) {
    return {format, random_array(format, kind, count, 1), random_array(format, Values::Ordinary, count, 2)};
  }

  Passed& run(const KernelTable& table = kernels()) {
    gelu(format, x.at(0), output.at(0), x.count, table);
    gelu_backward(format, x.at(0), grad.at(0), x_grad.at(0), x.count, table);
    return *this;
  }
};

TEST(Gelu, HasTheSameBitsInEveryTable) {
  for (Format format : kLowFormats)
    for (Values kind : kValues)
      for (std::size_t count : {1, 15, 16, 17, 33, 1025, 3000}) {
        const Passed twin = Passed::random(format, kind, count).run(kScalarKernels);
        for (const KernelTable* table : available_kernels()) {
          const Passed here = Passed::random(format, kind, count).run(*table);
          const std::string what = std::string(table->isa) + " " + traits(format).name;
          expect_same_bits(here.output, twin.output, what);
          expect_same_bits(here.x_grad, twin.x_grad, what);
        }
      }
}

/// GELU's factor of x, its slope, and how far the kernel may be from either, in FP32.
struct GeluAt {
  long double factor, slope, factor_error, slope_error;
};

// 2 y is five products and a sum of positive terms, two constants among them: 7 u of it, so e^-2y is off by
// (7 |2 y| + 1.5) u, and s = 1 / (1 + e^-2y) by ds = s ((1 - s) (7 |2 y| + 1.5) + 2) u. The slope is s (1 + x
// (1 - s) i), where i, the derivative of 2 y, is off by 6 u and 1 - s by ds + u.
GeluAt gelu_by_tanh(long double x) {
  const long double root = std::sqrt(2 / std::acos(-1.0L)), cubic = 0.044715L;
  const long double twice = 2 * root * (x + cubic * x * x * x), inner = 2 * root * (1 + 3 * cubic * x * x);
  const long double s = 1 / (1 + std::exp(-twice)), rest = 1 / (1 + std::exp(twice));
  const long double ds = s * (rest * (7 * std::abs(twice) + 1.5L) + 2) * u;
  const long double bend = 1 + x * rest * inner;
  const long double bend_error = std::abs(x) * inner * (ds + u + 7 * u * rest) + u * std::abs(bend);
  return {s, s * bend, ds, ds * std::abs(bend) + s * bend_error};
}

TEST(Gelu, IsWithinItsRoundingsOfTheDefinition) {
  for (Format format : kLowFormats)
    for (Values kind : {Values::Ordinary, Values::Mixed}) {
      const std::size_t count = 5000;
      Passed c = Passed::random(format, kind, count);
      for (std::size_t i = 0; i < 2000; ++i)  // where GELU bends
        c.x.set(i, code_of(static_cast<float>(i) * 0.013F - 13, format));
      c.run();
      for (std::size_t i = 0; i < count; ++i) {
        const long double x = value_of(c.x.code(i), format), g = value_of(c.grad.code(i), format);
        if (std::abs(x) > 9) continue;  // there e^x leaves FP32: the next test
        const GeluAt at = gelu_by_tanh(x);
        const auto expect_near = [&](const Array& made, long double exact, long double error) {
          ASSERT_LE(std::abs(value_of(made.code(i), format) - exact),
                    1.01L * (error + half_unit(exact, format)) + 8 * 0x1p-149L)
              << "x " << double(x) << " grad " << double(g);
        };
        expect_near(c.output, x * at.factor, std::abs(x) * (at.factor_error + u * at.factor));
        expect_near(c.x_grad, g * at.slope, std::abs(g) * (at.slope_error + 2 * u * std::abs(at.slope)));
      }
    }
}

TEST(Gelu, FarFromZeroItIsZeroOrItsInput) {
  for (Format format : kLowFormats) {
    const float largest = format == Format::FP16 ? 60000 : 3e38F;
    const std::vector<float> values = {-largest, -1000, -20, -15, 15, 20, 1000, largest};
    Passed c(format, low_array(format, values), low_array(format, std::vector<float>(values.size(), 2)));
    c.run();
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(value_of(c.output.code(i), format), values[i] < 0 ? 0 : value_of(c.x.code(i), format));
      EXPECT_EQ(value_of(c.x_grad.code(i), format), values[i] < 0 ? 0 : 2);
    }
  }
}

TEST(Gelu, ANaNStaysWhereItIsAndPositiveInfinityPasses) {
  for (Format format : kLowFormats)
    for (const bool in_grad : {false, true}) {
      std::vector<float> values(40, 1);
      values[17] = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> others(40, 1);
      if (in_grad) others[5] = kInf;
      Passed c(format, low_array(format, in_grad ? others : values),
               low_array(format, in_grad ? values : others));
      c.run();
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(std::isnan(value_of(c.output.code(i), format)), i == 17 && !in_grad);
        EXPECT_EQ(std::isnan(value_of(c.x_grad.code(i), format)), i == 17);
      }
      if (in_grad) {
        EXPECT_EQ(value_of(c.output.code(5), format), kInf);
        EXPECT_EQ(value_of(c.x_grad.code(5), format), 1);
      }
    }
}

/// Heads of three positions in a larger array, with gaps between them.
struct Turned {
  static constexpr std::size_t kRows = 3;
  Format format;
  std::size_t columns, stride;
  Array values, output;
  std::vector<float> cos, sin;

  Turned(Format format, Values kind, std::size_t columns)
      : format(format),
        columns(columns),
        stride(columns + 5),
        values(random_array(format, kind, kRows * stride, 1)),
        output(bytes_of(format), kRows * stride, 1),
        cos(columns),
        sin(columns) {
    const auto angles = random_values(Values::Ordinary, columns, 2);
    for (std::size_t i = 0; i < columns; ++i) cos[i] = std::cos(angles[i]), sin[i] = std::sin(angles[i]);
  }

  Turned& run(decltype(&rotate) turn, const KernelTable& table = kernels()) {
    turn({format, values.at(0), stride, output.at(0), stride, kRows, columns}, cos.data(), sin.data(), table);
    return *this;
  }
};

constexpr std::size_t kHeadSizes[] = {2, 6, 32, 48, 64, 128, 130};

TEST(Rotate, HasTheSameBitsInEveryTableAndWritesNothingBetweenRows) {
  for (Format format : kLowFormats)
    for (Values kind : kValues)
      for (std::size_t columns : kHeadSizes)
        for (const auto turn : {rotate, rotate_back}) {
          const Turned twin = Turned(format, kind, columns).run(turn, kScalarKernels);
          for (const KernelTable* table : available_kernels()) {
            const Turned here = Turned(format, kind, columns).run(turn, *table);
            expect_same_bits(here.output, twin.output, table->isa);
          }
          for (std::size_t i = 0; i < twin.output.count; ++i)
            if (i % twin.stride >= columns) {
              ASSERT_EQ(twin.output.code(i), 0U);
            }
        }
}

// Two products and a sum, each rounded to FP32, and one rounding to the format.
TEST(Rotate, IsWithinItsRoundingsOfTheDefinitionAndBackIsItsTranspose) {
  for (Format format : kLowFormats)
    for (std::size_t columns : kHeadSizes)
      for (const bool back : {false, true}) {
        Turned c(format, Values::Ordinary, columns);
        c.run(back ? rotate_back : rotate);
        const std::size_t half = columns / 2;
        for (std::size_t at = 0; at < Turned::kRows * c.stride; ++at) {
          const std::size_t i = at % c.stride;
          if (i >= columns) continue;
          const bool first = i < half;
          const std::size_t other = first ? i + half : i - half;
          const long double x = value_of(c.values.code(at), format),
                            y = value_of(c.values.code(at - i + other), format);
          // Forward row i has cos[i] and -sin[i] (first half) or +sin[i]: backward has its columns.
          const long double by_sin = back ? (first ? 1 : -1) * static_cast<long double>(c.sin[other])
                                          : (first ? -1 : 1) * static_cast<long double>(c.sin[i]);
          const long double exact = x * c.cos[i] + y * by_sin;
          const long double error = 2 * u * (std::abs(x * c.cos[i]) + std::abs(y * by_sin));
          ASSERT_LE(std::abs(value_of(c.output.code(at), format) - exact),
                    1.01L * (error + half_unit(exact, format)));
        }
      }
}

}  // namespace
}  // namespace halfstep
