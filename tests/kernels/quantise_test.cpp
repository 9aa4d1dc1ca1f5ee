// Quantised matrices beside a reference that shares no line with the kernels: scales from exact powers of two
// and FP64 quotients, codes from the reference cast of formats.h.
#include "kernels/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support/quantise_reference.h"

namespace halfstep {
namespace {

using testing::adversarial;
using testing::Matrix;
using testing::Reference;
using testing::reference_scale;

struct Rule {
  std::string what;
  QuantiseRule rule;
};

constexpr std::size_t kWhole = 1 << 20;

std::vector<Rule> rules(std::size_t rows, std::size_t columns) {
  std::vector<Rule> all;
  for (const Format codes : {Format::E4M3, Format::E5M2, Format::E2M1})
    for (const ScaleRule scale :
         {ScaleRule::Fp32, ScaleRule::PowerOfTwo, ScaleRule::E8m0Floor, ScaleRule::E8m0Ceil, ScaleRule::E4m3})
      for (const BlockShape block : {BlockShape{1, 16},
                                     {16, 1},
                                     {1, 32},
                                     {32, 1},
                                     {1, 128},
                                     {128, 1},
                                     {128, 128},
                                     {16, 16},
                                     {1, kWhole},
                                     {kWhole, 1},
                                     {kWhole, kWhole}}) {
        if (scale == ScaleRule::E4m3 && codes != Format::E2M1) continue;
        const BlockShape shape{std::min(block.rows, rows), std::min(block.columns, columns)};
        all.push_back({std::string(traits(codes).name) + " scale rule " +
                           std::to_string(static_cast<int>(scale)) + " blocks " + std::to_string(shape.rows) +
                           "x" + std::to_string(shape.columns),
                       {.codes = codes, .block = shape, .scale = scale, .tensor_scale = 0.0123f}});
      }
  return all;
}

TEST(Quantise, CodesAndScalesOfEveryRuleAreThoseOfTheReferenceInEveryTable) {
  // 33 and 150 are no multiples of any block; 1,500 is more than the kernels take at a time.
  for (const auto& [rows, columns] :
       {std::pair<std::size_t, std::size_t>{33, 150}, {3, 1500}, {129, 40}, {1, 1}})
    for (const Matrix& matrix : adversarial(rows, columns, 7))
      for (const auto& [what, rule] : rules(rows, columns)) {
        SCOPED_TRACE(matrix.what + ", " + what);
        const std::size_t across = (columns + rule.block.columns - 1) / rule.block.columns;
        const std::size_t bands = (rows + rule.block.rows - 1) / rule.block.rows;
        std::vector<double> amax(bands * across);
        const auto block_of = [&](std::size_t i) {
          return i / columns / rule.block.rows * across + i % columns / rule.block.columns;
        };
        for (std::size_t i = 0; i < matrix.values.size(); ++i)
          amax[block_of(i)] = std::max(amax[block_of(i)], std::abs(double{matrix.values[i]}));
        std::vector<Reference> scales;
        for (const double each : amax) scales.push_back(reference_scale(each, rule));
        std::vector<std::uint8_t> expected;
        for (std::size_t i = 0; i < matrix.values.size(); ++i)
          expected.push_back(static_cast<std::uint8_t>(
              encode_float(matrix.values[i] * scales[block_of(i)].encode, rule.codes)));

        std::vector<std::uint16_t> low;
        for (const float value : matrix.values)
          low.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16));
        for (const KernelTable* table : available_kernels())
          for (const Format format : {Format::FP32, Format::BF16}) {
            const void* values =
                format == Format::FP32 ? static_cast<const void*>(matrix.values.data()) : low.data();
            std::vector<std::uint8_t> codes(matrix.values.size(), 0xee);
            std::vector<float> stored(amax.size());
            QuantiseCounts counts;
            quantise({format, values, rows, columns, columns}, rule, {0, rows, 0, columns}, codes.data(),
                     stored.data(), counts, nullptr, *table);
            ASSERT_EQ(codes, expected) << table->isa;
            for (std::size_t block = 0; block < amax.size(); ++block) {
              const std::uint32_t found = scale_bytes(rule.scale) == 4
                                              ? std::bit_cast<std::uint32_t>(stored[block])
                                              : reinterpret_cast<const std::uint8_t*>(stored.data())[block];
              ASSERT_EQ(found, scales[block].stored)
                  << table->isa << ", block " << block << ", amax " << amax[block];
            }
            ASSERT_EQ(std::bit_cast<float>(counts.largest), *std::max_element(amax.begin(), amax.end()));
          }
      }
}

TEST(Quantise, EveryDecodedValueIsTheCodeTimesItsScale) {
  const std::size_t rows = 33, columns = 70;
  const Matrix matrix = adversarial(rows, columns, 3)[0];
  for (const auto& [what, rule] : rules(rows, columns)) {
    SCOPED_TRACE(what);
    std::vector<std::uint8_t> codes(rows * columns);
    std::vector<float> scales(rows * columns);
    QuantiseCounts counts;
    quantise({Format::FP32, matrix.values.data(), rows, columns, columns}, rule, {0, rows, 0, columns},
             codes.data(), scales.data(), counts);
    const std::size_t across = (columns + rule.block.columns - 1) / rule.block.columns;
    for (const KernelTable* table : available_kernels()) {
      std::vector<float> values(rows * columns);
      std::vector<std::uint16_t> low(rows * columns);
      dequantise(codes.data(), scales.data(), rule, rows, columns, {0, rows, 0, columns}, Format::FP32,
                 values.data(), *table);
      dequantise(codes.data(), scales.data(), rule, rows, columns, {0, rows, 0, columns}, Format::BF16,
                 low.data(), *table);
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const std::size_t block = i / columns / rule.block.rows * across + i % columns / rule.block.columns;
        const float expected =
            decode_float(codes[i], rule.codes) * decoded_scale(scales.data(), rule.scale, block);
        ASSERT_EQ(values[i], expected) << table->isa;
        if (rule.scale != ScaleRule::Fp32) {
          ASSERT_EQ(std::bit_cast<float>(std::uint32_t{low[i]} << 16), expected);
        }
      }
    }
  }
}

TEST(Quantise, EveryCodeDecodesInEveryTable) {
  std::vector<std::uint8_t> codes(256);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i);
  for (const Format format : {Format::E4M3, Format::E5M2, Format::E2M1})
    for (const KernelTable* table : available_kernels()) {
      const std::size_t count = std::size_t{1} << traits(format).bits;
      std::vector<float> values(count);
      dequantise(codes.data(), nullptr, {format, {1, count}, ScaleRule::Fp32}, 1, count, {0, 1, 0, count},
                 Format::FP32, values.data(), *table);
      for (std::size_t i = 0; i < count; ++i) {
        const float expected = decode_float(static_cast<std::uint32_t>(i), format);
        EXPECT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected))
            << traits(format).name << " " << i << " " << table->isa;
      }
    }
}

TEST(Quantise, ScalesAreFinitePositiveAndInvertibleForEveryFiniteAmax) {
  for (const float amax :
       {0.0f, 0x1p-149f, 0x1p-126f, 1e-30f, 1e-12f, 1.0f, 448.0f, 1e30f, std::numeric_limits<float>::max()})
    for (const Format codes : {Format::E4M3, Format::E5M2, Format::E2M1})
      for (const ScaleRule rule : {ScaleRule::Fp32, ScaleRule::PowerOfTwo, ScaleRule::E8m0Floor,
                                   ScaleRule::E8m0Ceil, ScaleRule::E4m3}) {
        const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(amax);
        const BlockScale scale = block_scale(magnitude, codes, rule, nvfp4_tensor_scale(magnitude));
        EXPECT_TRUE(std::isfinite(scale.encode) && scale.encode > 0) << amax;
        EXPECT_TRUE(std::isfinite(scale.decode) && scale.decode > 0) << amax;
        EXPECT_TRUE(std::isfinite(amax * scale.encode)) << amax;
      }
}

TEST(Quantise, WhatIsNotFiniteStaysVisible) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()})
    for (const Format codes : {Format::E4M3, Format::E5M2, Format::E2M1})
      for (const ScaleRule rule : {ScaleRule::Fp32, ScaleRule::PowerOfTwo, ScaleRule::E8m0Floor,
                                   ScaleRule::E8m0Ceil, ScaleRule::E4m3}) {
        // E2M1 has no code for it: its scale must say so, which an FP32 scale of the tensor does not.
        if (codes == Format::E2M1 && (rule == ScaleRule::Fp32 || rule == ScaleRule::PowerOfTwo)) continue;
        std::vector<float> values(40, 1.0f);
        values[35] = bad;
        for (const KernelTable* table : available_kernels()) {
          std::vector<std::uint8_t> made(40);
          std::vector<float> scales(40), back(40);
          QuantiseCounts counts;
          const QuantiseRule how{codes, {1, 16}, rule, 0.01f};
          quantise({Format::FP32, values.data(), 1, 40, 40}, how, {0, 1, 0, 40}, made.data(), scales.data(),
                   counts, nullptr, *table);
          dequantise(made.data(), scales.data(), how, 1, 40, {0, 1, 0, 40}, Format::FP32, back.data(),
                     *table);
          EXPECT_FALSE(std::isfinite(back[35])) << traits(codes).name << " " << static_cast<int>(rule);
          EXPECT_TRUE(std::isfinite(back[0])) << "another block";
          EXPECT_GE(counts.largest, 0x7f800000u);
          EXPECT_EQ(counts.saturated, 0u);
        }
      }
}

TEST(Quantise, CountsWhatSaturatesAndWhatVanishes) {
  std::vector<float> values = {0, 0.0f, 1e-9f, -1e-9f, 448, 449, -1000, 464.1f};
  values.resize(100, 1.0f);
  for (const KernelTable* table : available_kernels()) {
    std::vector<std::uint8_t> codes(100);
    QuantiseCounts counts;
    quantise_scaled({Format::FP32, values.data(), 1, 100, 100}, Format::E4M3, 1, {0, 1, 0, 100}, codes.data(),
                    counts, nullptr, *table);
    EXPECT_EQ(counts.vanished, 2u);
    EXPECT_EQ(counts.saturated, 2u);  // 449 rounds to 448
    EXPECT_EQ(std::bit_cast<float>(counts.largest), 1000.0f);
  }
}

TEST(Quantise, CodesAndCountsAroundEveryEdgeOfEveryFormatAreThoseOfExactArithmetic) {
  // Every exponent of FP32 with few bits after it, so that ties and their neighbours are among them; times
  // factors that leave FP32's range on either side. With and without a NaN beside them: other loops run.
  std::vector<float> values;
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent)
    for (const std::uint32_t low :
         {0u, 1u, 0x040000u, 0x080000u, 0x080001u, 0x0fffffu, 0x100000u, 0x180000u, 0x200000u, 0x400000u,
          0x500000u, 0x600000u, 0x680000u, 0x6fffffu, 0x700000u, 0x7fffffu})
      for (const std::uint32_t sign : {0u, 0x80000000u})
        values.push_back(std::bit_cast<float>(sign | exponent << 23 | low));
  const std::size_t finite = values.size();
  values.push_back(std::numeric_limits<float>::quiet_NaN());
  for (const Format codes : {Format::E4M3, Format::E5M2, Format::E2M1})
    for (const Format format : {Format::FP32, Format::BF16})
      for (const float factor : {1.0f, 3.0f, 0x1p20f, 0x1p-20f, 0x1p100f})
        for (const std::size_t count : {finite, finite + 1}) {
          std::vector<std::uint16_t> low;
          std::vector<std::uint8_t> expected;
          QuantiseCounts exact;
          for (std::size_t i = 0; i < count; ++i) {
            const auto bits = std::bit_cast<std::uint32_t>(values[i]);
            low.push_back(static_cast<std::uint16_t>(bits >> 16));
            const float value = format == Format::FP32 ? values[i] : std::bit_cast<float>(bits & 0xffff0000u);
            // Beyond FP32's range a finite product is as good as its largest number.
            const float largest = std::numeric_limits<float>::max();
            const float product = std::isnan(value) ? value : std::clamp(value * factor, -largest, largest);
            const auto code = encode_float(product, codes);
            const bool held = std::abs(product) > traits(codes).max &&
                              encode_float(product, codes, {.overflow = Overflow::NonFinite}) != code;
            expected.push_back(static_cast<std::uint8_t>(code));
            exact.vanished += value != 0 && decode_float(code, codes) == 0;
            exact.saturated += codes == Format::E2M1 ? std::abs(product) >= 7 : held;
          }
          for (const KernelTable* table : available_kernels()) {
            SCOPED_TRACE(std::string(table->isa) + ", " + std::string(traits(codes).name) + " x " +
                         std::to_string(factor));
            std::vector<std::uint8_t> found(count);
            QuantiseCounts counts;
            const void* input = format == Format::FP32 ? static_cast<const void*>(values.data()) : low.data();
            quantise_scaled({format, input, 1, count, count}, codes, factor, {0, 1, 0, count}, found.data(),
                            counts, nullptr, *table);
            EXPECT_EQ(found, expected);
            EXPECT_EQ(counts.vanished, exact.vanished);
            EXPECT_EQ(counts.saturated, exact.saturated);
          }
        }
}

TEST(Quantise, BlocksOfAnyWidthAreDecodedWithTheirOwnScales) {
  // The kernels take 1,024 columns at a time; blocks may end anywhere.
  const std::size_t rows = 3, columns = 4096;
  std::vector<float> values(rows * columns);
  for (const std::size_t width : {512u, 1000u, 1024u, 1500u, 1536u, 2048u, 3000u, 5000u})
    for (const KernelTable* table : available_kernels()) {
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = (i % columns < width ? 1000.0f : 1.0f) * static_cast<float>(1 + i % 7);
      const QuantiseRule rule{Format::E4M3, {1, width}, ScaleRule::PowerOfTwo};
      std::vector<std::uint8_t> codes(values.size());
      std::vector<float> scales(values.size()), back(values.size());
      QuantiseCounts counts;
      quantise({Format::FP32, values.data(), rows, columns, columns}, rule, {0, rows, 0, columns},
               codes.data(), scales.data(), counts, nullptr, *table);
      dequantise(codes.data(), scales.data(), rule, rows, columns, {0, rows, 0, columns}, Format::FP32,
                 back.data(), *table);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(back[i], values[i], values[i] / 16) << width << " at " << i << ", " << table->isa;
    }
}

TEST(Quantise, FlushingToZeroChangesNoScale) {
  const unsigned int before = __builtin_ia32_stmxcsr();
  for (const float amax : {4e-36f, 1e-37f, 1e-40f, 1.0f, 448.0f, 448.0001f}) {
    const auto magnitude = std::bit_cast<std::uint32_t>(amax);
    for (const ScaleRule rule :
         {ScaleRule::E8m0Ceil, ScaleRule::E8m0Floor, ScaleRule::Fp32, ScaleRule::PowerOfTwo}) {
      const auto plain = block_scale(magnitude, Format::E4M3, rule, 1).stored;
      __builtin_ia32_ldmxcsr(before | 0x8040u);
      const auto flushed = block_scale(magnitude, Format::E4M3, rule, 1).stored;
      __builtin_ia32_ldmxcsr(before);
      EXPECT_EQ(flushed, plain) << amax << ", rule " << static_cast<int>(rule);
    }
    EXPECT_EQ(block_scale(magnitude, Format::E4M3, ScaleRule::E8m0Ceil, 1).stored, e8m0_ceil(amax / 448))
        << amax;
  }
}

TEST(Quantise, StochasticCodesAreCountedByTheirValues) {
  std::vector<float> values(16, 1e-30f);
  values[0] = 1e25f;
  for (const float bad : {0.0f, std::numeric_limits<float>::infinity()}) {
    values[1] = bad;
    const StochasticStream stream{};
    std::vector<std::uint8_t> codes(16);
    QuantiseCounts counts;
    quantise_scaled({Format::FP32, values.data(), 1, 16, 16}, Format::E4M3, 448e-25f, {0, 1, 0, 16},
                    codes.data(), counts, &stream);
    EXPECT_EQ(counts.vanished, 14u);
    EXPECT_EQ(counts.saturated, 0u);
  }
}

TEST(Quantise, PartsOfAMatrixMakeTheWhole) {
  const std::size_t rows = 64, columns = 96;
  const Matrix matrix = adversarial(rows, columns, 9)[1];
  const QuantiseInput input{Format::FP32, matrix.values.data(), rows, columns, columns};
  const QuantiseRule rule{Format::E4M3, {16, 32}, ScaleRule::E8m0Ceil};
  std::vector<std::uint8_t> whole(rows * columns), parts(rows * columns);
  std::vector<std::uint8_t> whole_scales(12), part_scales(12);
  QuantiseCounts counts;
  quantise(input, rule, {0, rows, 0, columns}, whole.data(), whole_scales.data(), counts);
  for (std::size_t row = 0; row < rows; row += 16)
    for (std::size_t column = 0; column < columns; column += 32)
      quantise(input, rule, {row, 16, column, 32}, parts.data(), part_scales.data(), counts);
  EXPECT_EQ(parts, whole);
  EXPECT_EQ(part_scales, whole_scales);
}

}  // namespace
}  // namespace halfstep
