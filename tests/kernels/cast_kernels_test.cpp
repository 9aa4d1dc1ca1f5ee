// Every table against the reference cast, against its scalar twin, and against anything that should not
// matter: length, alignment, chunking, MXCSR.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "formats/spec_oracle.h"
#include "kernels/cast.h"

namespace halfstep {
namespace {

constexpr Format kCastable[] = {Format::TF32, Format::BF16,     Format::FP16,     Format::E4M3,
                                Format::E5M2, Format::E4M3FNUZ, Format::E5M2FNUZ, Format::E2M1};

std::vector<CastMode> all_modes() {
  std::vector<CastMode> modes;
  for (Rounding rounding : {Rounding::NearestEven, Rounding::TowardZero, Rounding::Stochastic})
    for (Overflow overflow : {Overflow::Saturate, Overflow::NonFinite})
      for (InfInput inf_input : {InfInput::Saturate, InfInput::NonFinite})
        modes.push_back({rounding, overflow, inf_input});
  return modes;
}

std::string describe(const KernelTable& table, Format format, CastMode mode) {
  return std::string(table.isa) + " " + traits(format).name + " rounding " +
         std::to_string(int(mode.rounding)) + " overflow " + std::to_string(int(mode.overflow)) + " inf " +
         std::to_string(int(mode.inf_input));
}

const StochasticKey kKey{.seed = 0x123456789abcdef0, .tensor = 7, .step = 1000};

void run(const KernelTable& table, std::span<const float> values, Format format, CastMode mode,
         std::uint64_t first_element, void* codes) {
  if (mode.rounding == Rounding::Stochastic) {
    cast_stochastic(values, format, mode, {kKey, first_element}, codes, table);
  } else {
    cast(values, format, mode, codes, table);
  }
}

std::uint32_t code_at(const std::vector<std::uint8_t>& codes, Format format, std::size_t i) {
  std::uint32_t code = 0;
  std::memcpy(&code, codes.data() + i * code_bytes(format), code_bytes(format));
  return code;
}

std::uint32_t reference(float x, Format format, CastMode mode, std::uint64_t element) {
  return mode.rounding == Rounding::Stochastic ? encode_float_stochastic(x, format, mode, kKey, element)
                                               : encode_float(x, format, mode);
}

TEST(CastKernels, EqualTheReferenceInEveryTableFormatAndMode) {
  for (const KernelTable* table : available_kernels())
    for (Format format : kCastable) {
      const std::vector<float> values = oracle::edge_values(format);
      std::vector<std::uint8_t> codes(values.size() * code_bytes(format));
      for (CastMode mode : all_modes()) {
        run(*table, values, format, mode, 0, codes.data());
        for (std::size_t i = 0; i < values.size(); ++i)
          ASSERT_EQ(code_at(codes, format, i), reference(values[i], format, mode, i))
              << describe(*table, format, mode) << " of " << std::hexfloat << values[i] << " at " << i;
      }
    }
}

// Lengths around every vector and four-vector boundary, starts that no vector load would call aligned, a
// start in the middle of a Philox block, and a guard behind the end.
TEST(CastKernels, LengthAndAlignmentDoNotMatterAndNothingIsWrittenBehindTheEnd) {
  constexpr std::uint8_t kGuard = 0xa5;
  for (Format format : kCastable) {
    std::vector<float> values = oracle::edge_values(format);
    values.resize(200);
    const std::size_t bytes = code_bytes(format);
    for (const KernelTable* table : available_kernels())
      for (CastMode mode : {CastMode{}, CastMode{.rounding = Rounding::TowardZero},
                            CastMode{.rounding = Rounding::Stochastic}})
        for (std::size_t offset = 0; offset < 5; ++offset)
          for (std::size_t count = 0; count <= 150; ++count) {
            std::vector<std::uint8_t> codes((offset + count + 64) * bytes, kGuard);
            run(*table, std::span(values).subspan(offset, count), format, mode, offset,
                codes.data() + offset * bytes);
            for (std::size_t i = offset; i < offset + count; ++i)
              ASSERT_EQ(code_at(codes, format, i), reference(values[i], format, mode, i))
                  << describe(*table, format, mode) << " offset " << offset << " count " << count << " at "
                  << i;
            const auto untouched = [&](std::size_t begin, std::size_t end) {
              return std::all_of(codes.begin() + begin, codes.begin() + end,
                                 [](auto b) { return b == kGuard; });
            };
            ASSERT_TRUE(untouched(0, offset * bytes));
            ASSERT_TRUE(untouched((offset + count) * bytes, codes.size()))
                << describe(*table, format, mode) << " offset " << offset << " count " << count;
          }
  }
}

TEST(StochasticKernels, ChunkingDoesNotMatter) {
  std::vector<float> values(1000, 1.0f + 0x1p-5f);
  const CastMode mode{.rounding = Rounding::Stochastic};
  std::vector<std::uint8_t> whole(values.size());
  run(kernels_of_isa("scalar"), values, Format::E4M3, mode, 0, whole.data());
  EXPECT_GT(std::count(whole.begin(), whole.end(), 0x39), 100) << "some go up";
  for (const KernelTable* table : available_kernels())
    for (std::size_t chunk : {1, 3, 17, 64, 65, 999, 1000}) {
      std::vector<std::uint8_t> pieces(values.size());
      for (std::size_t i = 0; i < values.size(); i += chunk) {
        const std::size_t count = std::min(chunk, values.size() - i);
        run(*table, std::span(values).subspan(i, count), Format::E4M3, mode, i, pieces.data() + i);
      }
      EXPECT_EQ(pieces, whole) << table->isa << " chunks of " << chunk;
    }
}

// The number of a Philox block has 64 bits; a vector of blocks may cross from one low word to the next.
TEST(StochasticKernels, ElementNumbersBeyond32BitsCarryIntoTheUpperWord) {
  std::vector<float> values(300, 1.0f + 0x1p-5f);
  const CastMode mode{.rounding = Rounding::Stochastic};
  for (std::uint64_t first : {(1ull << 34) - 100, (3ull << 34) - 128, (1ull << 40) + 2}) {
    for (const KernelTable* table : available_kernels()) {
      std::vector<std::uint8_t> codes(values.size());
      run(*table, values, Format::E4M3, mode, first, codes.data());
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(codes[i], encode_float_stochastic(values[i], Format::E4M3, mode, kKey, first + i))
            << table->isa;
    }
  }
}

TEST(DecodeKernels, EqualTheReferenceOnEveryCode) {
  for (const KernelTable* table : available_kernels())
    for (Format format : kCastable) {
      std::vector<std::uint8_t> codes;
      const std::uint64_t count = std::uint64_t{1} << traits(format).bits;
      const std::uint64_t stride = format == Format::TF32 ? 0x2000 : 1;
      for (std::uint64_t code = 0; code < count; code += stride)
        for (std::size_t b = 0; b < code_bytes(format); ++b)
          codes.push_back(static_cast<std::uint8_t>(code >> (8 * b)));
      std::vector<float> values(codes.size() / code_bytes(format));
      decode(codes.data(), format, values, *table);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]),
                  std::bit_cast<std::uint32_t>(decode_float(code_at(codes, format, i), format)))
            << table->isa << " " << traits(format).name << " code " << code_at(codes, format, i);
    }
}

TEST(DecodeKernels, LengthAndAlignmentDoNotMatter) {
  std::vector<std::uint8_t> codes(400);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i * 37);
  for (const KernelTable* table : available_kernels())
    for (std::size_t offset = 0; offset < 5; ++offset)
      for (std::size_t count = 0; count <= 70; ++count) {
        std::vector<float> values(offset + count + 20, -77.0f);
        decode(codes.data() + offset, Format::E5M2, std::span(values).subspan(offset, count), *table);
        for (std::size_t i = offset; i < offset + count; ++i)
          ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]),
                    std::bit_cast<std::uint32_t>(decode_float(codes[i], Format::E5M2)));
        ASSERT_EQ(values[offset + count], -77.0f);
      }
}

TEST(CastKernels, MxcsrDoesNotMatter) {
  // Flush-to-zero, denormals-are-zero, and rounding toward minus infinity.
  constexpr unsigned kHostileBits = 0x8040 | 0x2000;
  for (const KernelTable* table : available_kernels())
    for (Format format : kCastable) {
      const std::vector<float> values = oracle::edge_values(format);
      std::vector<std::uint8_t> codes[2];
      std::vector<float> decoded[2];
      for (CastMode mode : {CastMode{}, CastMode{.rounding = Rounding::TowardZero},
                            CastMode{.rounding = Rounding::Stochastic}}) {
        for (int hostile : {0, 1}) {
          codes[hostile].resize(values.size() * code_bytes(format));
          decoded[hostile].resize(values.size());
          const unsigned before = _mm_getcsr();
          if (hostile) _mm_setcsr(before | kHostileBits);
          run(*table, values, format, mode, 0, codes[hostile].data());
          decode(codes[hostile].data(), format, decoded[hostile], *table);
          _mm_setcsr(before);
        }
        EXPECT_EQ(codes[0], codes[1]) << describe(*table, format, mode);
        EXPECT_EQ(std::memcmp(decoded[0].data(), decoded[1].data(), values.size() * sizeof(float)), 0)
            << describe(*table, format, mode);
      }
    }
}

TEST(Cast, RefusesFormatsWithoutAnArrayCastAndRoundingsThatNeedAnotherCall) {
  const float value = 1;
  std::uint32_t code = 0;
  EXPECT_THROW(cast({&value, 1}, Format::E8M0, {}, &code), Error);
  EXPECT_THROW(cast({&value, 1}, Format::FP32, {}, &code), Error);
  EXPECT_THROW(cast({&value, 1}, Format::BF16, {.rounding = Rounding::Stochastic}, &code), Error);
  EXPECT_THROW(cast_stochastic({&value, 1}, Format::BF16, {}, {}, &code), Error);
}

}  // namespace
}  // namespace halfstep
