// Sums over gradients: of squares, and of micro-batches.
#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <limits>

#include "kernels/optimizer_state.h"

namespace halfstep {
namespace {

using namespace testing_state;

constexpr Format kGradFormats[] = {Format::FP32, Format::BF16, Format::FP16};

Array grads_of(const std::vector<float>& values, Format format, std::size_t offset = 0) {
  Array grads(bytes_of(format), values.size(), offset);
  for (std::size_t i = 0; i < values.size(); ++i) grads.set(i, code_of(values[i], format));
  return grads;
}

TEST(SumOfSquares, HasTheSameBitsInEveryTable) {
  for (Format format : kGradFormats)
    for (Values kind : kValues)
      for (std::size_t count : {0, 1, 15, 16, 17, 31, 32, 33, 1000, 4099}) {
        Array grads = grads_of(random_values(kind, count, 3), format, count % 4);
        const double twin = sum_of_squares(format, grads.at(0), count, kScalarKernels);
        for (const KernelTable* table : available_kernels()) {
          const double sum = sum_of_squares(format, grads.at(0), count, *table);
          ASSERT_TRUE(sum == twin || (std::isnan(sum) && std::isnan(twin)))
              << table->isa << " " << traits(format).name << " count " << count;
        }
      }
}

TEST(SumOfSquares, IsTheSumOfSquares) {
  constexpr std::size_t kCount = 4099;
  for (Format format : kGradFormats) {
    Array grads = grads_of(random_values(Values::Ordinary, kCount, 4), format);
    long double exact = 0;  // 64 bits: wrong by kCount * 2^-64 at most, far inside the bound
    for (std::size_t i = 0; i < kCount; ++i) {
      const long double x = value_of(grads.code(i), format);
      exact += x * x;
    }
    // Squares are exact in FP64; a lane adds kCount / 16 of them, the tree four times, 2^-53 each.
    const double bound = (double(kCount) / 16 + 1 + 4) * 0x1p-53 * double(exact);
    EXPECT_LE(std::abs(double(sum_of_squares(format, grads.at(0), kCount) - exact)), bound);
  }
}

TEST(SumOfSquares, IsFiniteExactlyIfEveryElementIs) {
  constexpr std::size_t kCount = 70;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const KernelTable* table : available_kernels())
    for (Format format : kGradFormats)
      for (std::size_t bad = 0; bad <= kCount; ++bad)
        for (float value : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
          std::vector<float> values(kCount, static_cast<float>(traits(format).max));
          if (bad < kCount) values[bad] = value;
          Array grads = grads_of(values, format);
          EXPECT_EQ(std::isfinite(sum_of_squares(format, grads.at(0), kCount, *table)), bad == kCount)
              << table->isa << " " << traits(format).name << " " << value << " at " << bad;
        }
}

TEST(Accumulate, IsFp32AdditionInEveryTable) {
  constexpr std::size_t kCount = 100;
  for (const KernelTable* table : available_kernels())
    for (Format format : kGradFormats) {
      std::vector<float> sum(kCount, -77), expected(kCount);
      for (int batch = 0; batch < 4; ++batch) {
        Array grads = grads_of(random_values(Values::Ordinary, kCount, 30 + batch), format, 1);
        accumulate(format, grads.at(0), sum.data(), kCount, batch == 0, *table);
        for (std::size_t i = 0; i < kCount; ++i) {
          const auto grad = static_cast<float>(value_of(grads.code(i), format));
          expected[i] = batch == 0 ? grad : expected[i] + grad;
        }
        ASSERT_EQ(sum, expected) << table->isa << " " << traits(format).name << " batch " << batch;
      }
    }
}

TEST(AccumulateKahan, KeepsWhatABf16SumLoses) {
  // 256 ones and a thousand 2^-4: a plain BF16 sum stays at 256, where neighbours are 2 apart.
  constexpr std::size_t kCount = 40;
  constexpr int kBatches = 1000;
  for (const KernelTable* table : available_kernels())
    for (Format format : kGradFormats) {
      std::vector<std::uint16_t> sum(kCount), compensation(kCount, 0x7fc0);
      Array first = grads_of(std::vector<float>(kCount, 256.0f), format);
      Array later = grads_of(std::vector<float>(kCount, 0x1p-4f), format);
      accumulate_kahan(format, first.at(0), sum.data(), compensation.data(), kCount, true, *table);
      for (int batch = 0; batch < kBatches; ++batch)
        accumulate_kahan(format, later.at(0), sum.data(), compensation.data(), kCount, false, *table);
      // Exact: the compensation stays below 1 in steps of 2^-4, which BF16 holds.
      for (std::size_t i = 0; i < kCount; ++i)
        ASSERT_EQ(decode_float(sum[i], Format::BF16) + decode_float(compensation[i], Format::BF16),
                  256 + kBatches * 0x1p-4f)
            << table->isa << " " << traits(format).name;
    }
}

TEST(AccumulateKahan, HasTheSameBitsInEveryTableAndStaysNearFp64) {
  constexpr std::size_t kCount = 300;
  constexpr int kBatches = 64;
  std::vector<std::uint16_t> twin_sum, twin_compensation;
  for (const KernelTable* table : available_kernels()) {
    std::vector<std::uint16_t> sum(kCount), compensation(kCount);
    std::vector<double> exact(kCount), magnitudes(kCount);
    for (int batch = 0; batch < kBatches; ++batch) {
      const std::vector<float> grads = random_values(Values::Ordinary, kCount, 500 + batch);
      accumulate_kahan(Format::FP32, grads.data(), sum.data(), compensation.data(), kCount, batch == 0,
                       *table);
      for (std::size_t i = 0; i < kCount; ++i) {
        exact[i] += grads[i];
        magnitudes[i] = std::max(magnitudes[i], std::abs(exact[i]) + std::abs(double(grads[i])));
      }
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      // A sum is off its true value by at most 2^-8 of itself, which the compensation holds to 2^-9 of that
      // (doubled for what it has from before); each batch adds that much at most, and a few 2^-24.
      const double bound = kBatches * (0x1p-16 + 0x1p-21) * magnitudes[i];
      const double total =
          double(decode_float(sum[i], Format::BF16)) + decode_float(compensation[i], Format::BF16);
      EXPECT_LE(std::abs(total - exact[i]), bound);
    }
    if (table == &kScalarKernels) {
      twin_sum = sum;
      twin_compensation = compensation;
    }
    EXPECT_EQ(sum, twin_sum) << table->isa;
    EXPECT_EQ(compensation, twin_compensation) << table->isa;
  }
}

TEST(Grads, FormatsWithoutKernelsAreRefused) {
  float value = 1;
  EXPECT_THROW(sum_of_squares(Format::E4M3, &value, 1), Error);
  EXPECT_THROW(accumulate(Format::TF32, &value, &value, 1, true), Error);
}

}  // namespace
}  // namespace halfstep
