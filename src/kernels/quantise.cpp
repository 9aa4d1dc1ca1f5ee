#include "kernels/quantise.h"

#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/cast_constants.h"

namespace halfstep {
namespace {

// Columns that are worked on at a time: their values, factors and magnitudes stay in the first cache.
constexpr std::size_t kChunk = 1024;
constexpr std::size_t kCacheLine = 64;

// Below it the factor of a block whose scale is E4M3's smallest would not be finite.
constexpr float kLeastTensorScale = 0x1p-119f;

constexpr float kE2m1Max = static_cast<float>(traits(Format::E2M1).max);
constexpr float kE4m3Max = static_cast<float>(traits(Format::E4M3).max);

int input_index(Format format) {
  HALFSTEP_CHECK(format == Format::FP32 || format == Format::BF16, "quantise: values are ",
                 traits(format).name, ", expected FP32 or BF16.");
  return format == Format::BF16;
}

const QuantiseRows::OfFormat& rows_of(const KernelTable& table, Format codes) {
  const int index = codes == Format::E4M3 ? 0 : codes == Format::E5M2 ? 1 : codes == Format::E2M1 ? 2 : -1;
  HALFSTEP_CHECK(index >= 0, "quantise: there are no codes of ", traits(codes).name,
                 ". Use E4M3, E5M2 or E2M1.");
  return table.quantise->of_format[index];
}

const void* at_value(const QuantiseInput& input, std::size_t row, std::size_t column) {
  const std::size_t element = row * input.row_stride + column;
  return static_cast<const char*>(input.values) + element * (input.format == Format::FP32 ? 4 : 2);
}

/// The exponent of the largest power of two that the format holds.
int largest_exponent(Format format) {
  const FormatTraits& t = traits(format);
  return static_cast<int>(t.max_code >> t.mantissa_bits) - t.bias;
}

constexpr bool is_one_byte(ScaleRule rule) {
  return rule == ScaleRule::E8m0Floor || rule == ScaleRule::E8m0Ceil || rule == ScaleRule::E4m3;
}

ScaleConstants scale_constants(Format codes, float tensor_scale) {
  const double max = traits(codes).max;
  return {.max = max,
          .max_fraction = std::bit_cast<std::uint32_t>(static_cast<float>(max)) & 0x7fffff,
          .largest_exponent = largest_exponent(codes),
          .tensor_scale = tensor_scale,
          .tensor_encode = 1 / tensor_scale};
}

/// Where the scale of a block lies.
void* at_scale(void* scales, ScaleRule rule, std::size_t block) {
  return static_cast<char*>(scales) + block * scale_bytes(rule);
}

std::size_t blocks_across(std::size_t columns, const BlockShape& block) {
  return block.columns == 0 ? 0 : (columns + block.columns - 1) / block.columns;
}

/// One row, or a part of it: codes of values * factors. `largest` is at least the largest magnitude in it.
class RowEncoder {
 public:
  RowEncoder(const QuantiseInput& input, Format codes_format, std::uint8_t* codes,
             const StochasticStream* stochastic, const KernelTable& table)
      : input_(input),
        format_(codes_format),
        codes_(codes),
        stochastic_(stochastic),
        table_(table),
        rows_(rows_of(table, codes_format)) {}

  void run(std::size_t row, std::size_t column, const float* factors, std::size_t count,
           std::uint32_t largest, QuantiseCounts& counts) {
    const std::size_t element = row * input_.columns + column;
    const void* values = at_value(input_, row, column);
    std::uint32_t found[2] = {};
    // What comes next, fetched while these are computed: looking for its largest is too short a work to hide
    // the wait.
    const std::size_t bytes = count * (input_.format == Format::FP32 ? 4 : 2);
    for (std::size_t offset = bytes; offset < 2 * bytes; offset += kCacheLine)
      __builtin_prefetch(static_cast<const char*>(values) + offset);
    if (stochastic_) {
      run_stochastic(values, factors, element, count, found);
    } else {
      const auto& encode = largest < kFp32Inf ? rows_.encode_finite : rows_.encode;
      encode[input_index(input_.format)](values, factors, codes_ + element, count, found);
    }
    counts.saturated += found[0];
    counts.vanished += found[1];
  }

 private:
  void run_stochastic(const void* values, const float* factors, std::size_t element, std::size_t count,
                      std::uint32_t* found) {
    alignas(64) float products[kChunk];
    table_.update->load_grads[input_.format == Format::FP32 ? kFp32Grads : kBf16Grads](values, 1, products,
                                                                                       count);
    bool is_zero[kChunk], is_finite[kChunk];
    for (std::size_t i = 0; i < count; ++i) {
      is_zero[i] = products[i] == 0;
      is_finite[i] = (std::bit_cast<std::uint32_t>(products[i]) & ~kFp32Sign) < kFp32Inf;
      products[i] *= factors[i];
    }

    cast_stochastic({products, count}, format_, {.rounding = Rounding::Stochastic},
                    {stochastic_->key, stochastic_->first_element + element}, codes_ + element, table_);
    const auto max = static_cast<float>(traits(format_).max);
    const std::uint8_t magnitude_bits = static_cast<std::uint8_t>((1u << (traits(format_).bits - 1)) - 1);
    for (std::size_t i = 0; i < count; ++i) {
      found[0] += is_finite[i] && (products[i] > max || products[i] < -max);
      found[1] += (codes_[element + i] & magnitude_bits) == 0 && !is_zero[i];
    }
  }

  const QuantiseInput& input_;
  Format format_;
  std::uint8_t* codes_;
  const StochasticStream* stochastic_;
  const KernelTable& table_;
  const QuantiseRows::OfFormat& rows_;
};

/// Blocks that are wider than a chunk, one after the other.
void quantise_wide_blocks(const QuantiseInput& input, const QuantiseRule& rule, const Rectangle& band,
                          RowEncoder& encoder, void* scales, QuantiseCounts& counts,
                          const KernelTable& table) {
  alignas(64) float factors[kChunk];
  const std::size_t end = band.first_column + band.columns;
  for (std::size_t column = band.first_column; column < end; column += rule.block.columns) {
    const Rectangle block{band.first_row, band.rows, column, std::min(rule.block.columns, end - column)};
    const std::uint32_t magnitude = largest_magnitude(input, block, table);
    counts.largest = std::max(counts.largest, magnitude);
    const BlockScale scale = block_scale(magnitude, rule.codes, rule.scale, rule.tensor_scale);
    const std::size_t index = block.first_row / rule.block.rows * blocks_across(input.columns, rule.block) +
                              column / rule.block.columns;
    std::memcpy(at_scale(scales, rule.scale, index), &scale.stored, scale_bytes(rule.scale));
    std::fill_n(factors, kChunk, scale.encode);
    for (std::size_t row = block.first_row; row < block.first_row + block.rows; ++row)
      for (std::size_t begin = 0; begin < block.columns; begin += kChunk)
        encoder.run(row, column + begin, factors, std::min(kChunk, block.columns - begin), magnitude, counts);
  }
}

/// The largest magnitude of each block that lies side by side in a part of a band, all of them in `found`.
void find_largest(const QuantiseInput& input, std::size_t width, const Rectangle& part, std::uint32_t* found,
                  const KernelTable& table) {
  alignas(64) std::uint32_t magnitudes[kChunk];
  const void* values = at_value(input, part.first_row, part.first_column);
  int index = input_index(input.format);
  std::size_t value_bytes = input.format == Format::FP32 ? 4 : 2;
  if (part.rows > 1) {
    // One row of magnitudes stands for all. Without a sign they are FP32 numbers themselves.
    std::uint32_t* raised = width == 1 ? found : magnitudes;
    std::fill_n(raised, part.columns, 0u);
    for (std::size_t row = part.first_row; row < part.first_row + part.rows; ++row)
      table.quantise->raise[index](at_value(input, row, part.first_column), raised, part.columns);
    if (width == 1) return;
    values = magnitudes;
    index = 0;
    value_bytes = 4;
  }
  const std::size_t whole = part.columns / width, rest = part.columns % width;
  table.quantise->largest_of_blocks[index](values, width, whole, found);
  if (rest > 0)
    found[whole] =
        table.quantise->largest[index](static_cast<const char*>(values) + whole * width * value_bytes, rest);
}

/// factors[i] of the block that column i lies in; the last block may be smaller than the others.
void spread(const float* of_blocks, std::size_t width, float* factors, std::size_t count,
            const KernelTable& table) {
  const std::size_t whole = count / width;
  table.quantise->spread(of_blocks, width, whole, factors);
  if (count % width > 0) std::fill(factors + whole * width, factors + count, of_blocks[whole]);
}

/// As many blocks side by side as a chunk holds.
void quantise_narrow_blocks(const QuantiseInput& input, const QuantiseRule& rule, const Rectangle& band,
                            RowEncoder& encoder, void* scales, QuantiseCounts& counts,
                            const KernelTable& table) {
  alignas(64) std::uint32_t magnitudes[kChunk];
  alignas(64) float encodes[kChunk], factors[kChunk];
  const ScaleConstants constants = scale_constants(rule.codes, rule.tensor_scale);
  const std::size_t width = rule.block.columns;
  const std::size_t step = kChunk / width * width, end = band.first_column + band.columns;
  for (std::size_t first = band.first_column; first < end; first += step) {
    const std::size_t count = std::min(step, end - first), blocks = (count + width - 1) / width;
    find_largest(input, width, {band.first_row, band.rows, first, count}, magnitudes, table);
    const std::size_t index =
        band.first_row / rule.block.rows * blocks_across(input.columns, rule.block) + first / width;
    table.quantise->scale_blocks[static_cast<std::size_t>(rule.scale)](
        magnitudes, blocks, constants, at_scale(scales, rule.scale, index), encodes);
    const std::uint32_t largest = table.quantise->largest[0](magnitudes, blocks);
    counts.largest = std::max(counts.largest, largest);
    if (width > 1) spread(encodes, width, factors, count, table);
    for (std::size_t row = band.first_row; row < band.first_row + band.rows; ++row)
      encoder.run(row, first, width > 1 ? factors : encodes, count, largest, counts);
  }
}

}  // namespace

std::size_t scale_bytes(ScaleRule rule) { return is_one_byte(rule) ? 1 : 4; }

BlockScale block_scale(std::uint32_t magnitude, Format codes, ScaleRule rule, float tensor_scale) {
  BlockScale scale{};
  kScalarKernels.quantise->scale_blocks[static_cast<std::size_t>(rule)](
      &magnitude, 1, scale_constants(codes, tensor_scale), &scale.stored, &scale.encode);
  scale.decode = decoded_scale(&scale.stored, rule, 0);
  return scale;
}

float decoded_scale(const void* scales, ScaleRule rule, std::size_t block) {
  switch (rule) {
    case ScaleRule::Fp32:
    case ScaleRule::PowerOfTwo:
    case ScaleRule::Unscaled:
      return static_cast<const float*>(scales)[block];
    case ScaleRule::E8m0Floor:
    case ScaleRule::E8m0Ceil:
      return decode_float(static_cast<const std::uint8_t*>(scales)[block], Format::E8M0);
    case ScaleRule::E4m3:
      return decode_float(static_cast<const std::uint8_t*>(scales)[block], Format::E4M3);
  }
  HALFSTEP_BUG("unknown ScaleRule ", static_cast<int>(rule));
}

float nvfp4_tensor_scale(std::uint32_t magnitude) {
  if (magnitude == 0 || magnitude >= kFp32Inf) return 1;
  return std::max(std::bit_cast<float>(magnitude) / (kE4m3Max * kE2m1Max), kLeastTensorScale);
}

void quantise(const QuantiseInput& input, const QuantiseRule& rule, const Rectangle& part,
              std::uint8_t* codes, void* scales, QuantiseCounts& counts, const StochasticStream* stochastic,
              const KernelTable& table) {
  RowEncoder encoder(input, rule.codes, codes, stochastic, table);
  const auto by_width = rule.block.columns > kChunk ? quantise_wide_blocks : quantise_narrow_blocks;
  const std::size_t end = part.first_row + part.rows;
  for (std::size_t row = part.first_row; row < end; row += rule.block.rows) {
    const Rectangle band{row, std::min(rule.block.rows, end - row), part.first_column, part.columns};
    by_width(input, rule, band, encoder, scales, counts, table);
  }
}

void quantise_scaled(const QuantiseInput& input, Format codes_format, float encode, const Rectangle& part,
                     std::uint8_t* codes, QuantiseCounts& counts, const StochasticStream* stochastic,
                     const KernelTable& table) {
  alignas(64) float factors[kChunk];
  std::fill_n(factors, kChunk, encode);
  RowEncoder encoder(input, codes_format, codes, stochastic, table);
  const auto largest = table.quantise->largest[input_index(input.format)];
  for (std::size_t row = part.first_row; row < part.first_row + part.rows; ++row)
    for (std::size_t begin = 0; begin < part.columns; begin += kChunk) {
      const std::size_t column = part.first_column + begin, count = std::min(kChunk, part.columns - begin);
      const std::uint32_t found = largest(at_value(input, row, column), count);
      counts.largest = std::max(counts.largest, found);
      encoder.run(row, column, factors, count, found, counts);
    }
}

std::uint32_t largest_magnitude(const QuantiseInput& input, const Rectangle& part, const KernelTable& table) {
  const auto largest = table.quantise->largest[input_index(input.format)];
  std::uint32_t found = 0;
  for (std::size_t row = part.first_row; row < part.first_row + part.rows; ++row)
    found = std::max(found, largest(at_value(input, row, part.first_column), part.columns));
  return found;
}

void dequantise(const std::uint8_t* codes, const void* scales, const QuantiseRule& rule, std::size_t rows,
                std::size_t columns, const Rectangle& part, Format output_format, void* output,
                const KernelTable& table) {
  HALFSTEP_CHECK(part.first_row + part.rows <= rows && part.first_column + part.columns <= columns,
                 "dequantise: the part ends outside the matrix.");
  alignas(64) float of_blocks[kChunk], factors[kChunk];
  const auto decode = rows_of(table, rule.codes).decode[input_index(output_format)];
  const std::size_t width = std::max<std::size_t>(1, rule.block.columns);
  const std::size_t output_bytes = output_format == Format::FP32 ? 4 : 2;
  const std::size_t across = blocks_across(columns, rule.block);
  const std::size_t end = part.first_column + part.columns;
  for (std::size_t first = part.first_column, count = 0; first < end; first += count) {
    // Whole blocks, or a part of one.
    const std::size_t step =
        width > kChunk ? std::min(kChunk, (first / width + 1) * width - first) : kChunk / width * width;
    count = std::min(step, end - first);
    if (!scales) std::fill_n(factors, count, 1.0f);
    std::size_t factors_of_band = rows;  // none yet
    for (std::size_t row = part.first_row; row < part.first_row + part.rows; ++row) {
      const std::size_t band = row / rule.block.rows;
      if (scales && band != factors_of_band) {
        const std::size_t index = band * across + first / width;
        if (width > kChunk) {
          std::fill_n(factors, count, decoded_scale(scales, rule.scale, index));
        } else {
          for (std::size_t block = 0; block * width < count; ++block)
            of_blocks[block] = decoded_scale(scales, rule.scale, index + block);
          spread(of_blocks, width, factors, count, table);
        }
        factors_of_band = band;
      }
      const std::size_t element = row * columns + first;
      decode(codes + element, factors, static_cast<char*>(output) + element * output_bytes, count);
    }
  }
}

}  // namespace halfstep
