#include "quant/quantised.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>

#include "base/cpu_features.h"
#include "formats/philox.h"
#include "kernels/cast.h"
#include "quant/on_device.h"

// A product of BF16 matrices into FP32: MKL's, which LibTorch 2.13 links in and exports. Weak, so that a
// LibTorch without it is no fault: products then run in FP32.
extern "C" __attribute__((weak)) void cblas_gemm_bf16bf16f32(int layout, int transpose_a, int transpose_b,
                                                             int m, int n, int k, float alpha, const void* a,
                                                             int lda, const void* b, int ldb, float beta,
                                                             float* c, int ldc);

namespace halfstep {
namespace {

constexpr std::int64_t kHadamardGroup = 16;
// Elements that one task quantises at least: below it a thread costs more than it brings.
constexpr std::int64_t kTaskElements = 1 << 15;

QuantiseInput input_of(const at::Tensor& matrix) {
  return {.format = matrix.scalar_type() == at::kBFloat16 ? Format::BF16 : Format::FP32,
          .values = matrix.const_data_ptr(),
          .rows = static_cast<std::size_t>(matrix.size(0)),
          .columns = static_cast<std::size_t>(matrix.size(1)),
          .row_stride = static_cast<std::size_t>(matrix.stride(0))};
}

/// FP32 or BF16 with rows that have no gaps: what the kernels read.
at::Tensor readable(const at::Tensor& matrix) {
  at::Tensor plain = matrix.detach();
  if (plain.scalar_type() != at::kBFloat16) plain = plain.to(at::kFloat);
  const bool rows_are_dense = plain.stride(1) == 1 && plain.stride(0) >= plain.size(1);
  return rows_are_dense ? plain : plain.contiguous();
}

BlockShape block_of(const OperandRule& rule, bool sums_over_rows, const at::Tensor& matrix) {
  const auto rows = static_cast<std::size_t>(matrix.size(0)),
             columns = static_cast<std::size_t>(matrix.size(1));
  const auto along = static_cast<std::size_t>(rule.block_along);
  const auto across = static_cast<std::size_t>(rule.block_across);
  const auto part = [](std::size_t block, std::size_t whole) { return block == 0 ? whole : block; };
  return sums_over_rows ? BlockShape{part(along, rows), part(across, columns)}
                        : BlockShape{part(across, rows), part(along, columns)};
}

/// Whether decoding multiplies by the scales: exact, because they are powers of two or have four bits.
bool scales_are_exact(const OperandRule& rule) { return rule.scale != ScaleRule::Fp32; }

/// Of a task that works on so many elements at a time.
std::int64_t grain_of(std::int64_t elements) {
  return std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(1, elements));
}

/// work(first row, rows, counts) over parts of `step` rows each.
template <typename Work>
void over_rows(std::int64_t rows, std::int64_t step, std::int64_t columns, QuantiseCounts& counts,
               const Work& work) {
  const std::int64_t parts = (rows + step - 1) / step;
  std::mutex mutex;
  at::parallel_for(0, parts, grain_of(step * columns), [&](std::int64_t begin, std::int64_t end) {
    QuantiseCounts found;
    const std::int64_t first = begin * step, last = std::min(end * step, rows);
    work(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first), found);
    const std::lock_guard lock(mutex);
    counts.saturated += found.saturated;
    counts.vanished += found.vanished;
    counts.largest = std::max(counts.largest, found.largest);
  });
}

std::uint32_t largest_magnitude_of(const QuantiseInput& input) {
  QuantiseCounts counts;
  over_rows(static_cast<std::int64_t>(input.rows), 1, static_cast<std::int64_t>(input.columns), counts,
            [&](std::size_t first, std::size_t rows, QuantiseCounts& found) {
              found.largest = largest_magnitude(input, {first, rows, 0, input.columns});
            });
  return counts.largest;
}

StochasticStream stream_of(const QuantiseRequest& request) {
  return {.key = {.seed = request.random.seed, .tensor = request.random.tensor, .step = request.random.cast}};
}

void quantise_with_one_scale(const QuantiseInput& input, const QuantiseRequest& request, Quantised& made,
                             QuantiseCounts& counts) {
  const std::uint32_t magnitude =
      request.known_amax ? std::bit_cast<std::uint32_t>(*request.known_amax) : largest_magnitude_of(input);
  const BlockScale scale = block_scale(magnitude, made.rule.format, made.rule.scale, /*tensor_scale=*/1);
  const float margin = std::ldexp(1.0f, request.margin);
  made.outer_scale = scale.decode * margin;
  const StochasticStream stream = stream_of(request);
  over_rows(static_cast<std::int64_t>(input.rows), 1, static_cast<std::int64_t>(input.columns), counts,
            [&](std::size_t first, std::size_t rows, QuantiseCounts& found) {
              quantise_scaled(input, made.rule.format, scale.encode / margin, {first, rows, 0, input.columns},
                              made.codes.mutable_data_ptr<std::uint8_t>(), found,
                              made.rule.stochastic ? &stream : nullptr);
            });
}

void quantise_blocks(const QuantiseInput& input, const QuantiseRequest& request, const BlockShape& block,
                     Quantised& made, QuantiseCounts& counts) {
  QuantiseRule rule{.codes = made.rule.format, .block = block, .scale = made.rule.scale};
  if (rule.scale == ScaleRule::E4m3)
    rule.tensor_scale = made.outer_scale = nvfp4_tensor_scale(largest_magnitude_of(input));
  const StochasticStream stream = stream_of(request);
  const StochasticStream* random = made.rule.stochastic ? &stream : nullptr;
  std::uint8_t* codes = made.codes.mutable_data_ptr<std::uint8_t>();
  void* scales = made.scales.mutable_data_ptr();
  if (block.rows < input.rows || input.columns < 2 * kTaskElements / std::max<std::size_t>(1, input.rows)) {
    over_rows(static_cast<std::int64_t>(input.rows), static_cast<std::int64_t>(block.rows),
              static_cast<std::int64_t>(input.columns), counts,
              [&](std::size_t first, std::size_t rows, QuantiseCounts& found) {
                quantise(input, rule, {first, rows, 0, input.columns}, codes, scales, found, random);
              });
    return;
  }
  // One band: threads share its columns.
  over_rows(static_cast<std::int64_t>(input.columns), static_cast<std::int64_t>(block.columns),
            static_cast<std::int64_t>(input.rows), counts,
            [&](std::size_t first, std::size_t columns, QuantiseCounts& found) {
              quantise(input, rule, {0, input.rows, first, columns}, codes, scales, found, random);
            });
}

at::Tensor decoded_codes(const Quantised& matrix, bool with_scales, at::ScalarType type) {
  const at::Tensor output = at::empty(matrix.codes.sizes(), matrix.codes.options().dtype(type));
  const auto rows = matrix.codes.size(0), columns = matrix.codes.size(1);
  const QuantiseRule rule{.codes = matrix.rule.format,
                          .block = block_of(matrix.rule, matrix.sums_over_rows, matrix.codes),
                          .scale = matrix.rule.scale};
  const void* scales = with_scales && matrix.scales.defined() ? matrix.scales.const_data_ptr() : nullptr;
  const Format format = type == at::kBFloat16 ? Format::BF16 : Format::FP32;
  const auto* codes = matrix.codes.const_data_ptr<std::uint8_t>();
  void* values = output.mutable_data_ptr();
  at::parallel_for(0, rows, grain_of(columns), [&](std::int64_t begin, std::int64_t end) {
    const auto first = static_cast<std::size_t>(begin);
    const Rectangle part{first, static_cast<std::size_t>(end) - first, 0, static_cast<std::size_t>(columns)};
    dequantise(codes, scales, rule, static_cast<std::size_t>(rows), static_cast<std::size_t>(columns), part,
               format, values);
  });
  return output;
}

/// The FP32 factors of each row of a result, where scales vary across the sum and are not exact in the
/// operand; empty otherwise.
std::vector<float> factors_across(const Quantised& matrix) {
  if (!matrix.scales.defined() || matrix.scales.numel() == 0 || scales_are_exact(matrix.rule)) return {};
  const std::int64_t across = matrix.codes.size(matrix.sums_over_rows ? 1 : 0);
  const auto block = static_cast<std::int64_t>(matrix.rule.block_across);
  const float* scales = matrix.scales.const_data_ptr<float>();
  std::vector<float> factors(static_cast<std::size_t>(across));
  for (std::int64_t i = 0; i < across; ++i) factors[static_cast<std::size_t>(i)] = scales[i / block];
  return factors;
}

/// Whether every decoded value that is not zero is a normal number of BF16: AMX takes others for zero.
bool is_normal_in_bf16(const Quantised& matrix) {
  const bool has_e8m0 = matrix.rule.scale == ScaleRule::E8m0Floor || matrix.rule.scale == ScaleRule::E8m0Ceil;
  if (!has_e8m0 || !matrix.scales.defined()) return true;
  // E5M2's smallest code is 2^-16, and 2^-126 the smallest normal number.
  constexpr std::uint8_t kLeast = 127 - 126 + 16;
  const std::uint8_t* scales = matrix.scales.const_data_ptr<std::uint8_t>();
  return std::all_of(scales, scales + matrix.scales.numel(),
                     [](std::uint8_t code) { return code >= kLeast; });
}

/// left x right in FP32, before scales that vary across the sum.
at::Tensor bare_product(const Quantised& left, const Quantised& right) {
  const bool in_bf16 = cpu_features().amx_bf16 && cblas_gemm_bf16bf16f32 != nullptr &&
                       is_normal_in_bf16(left) && is_normal_in_bf16(right);
  const at::ScalarType type = in_bf16 ? at::kBFloat16 : at::kFloat;
  const auto operand = [&](const Quantised& matrix) {
    return decoded_codes(matrix, scales_are_exact(matrix.rule), type);
  };
  const at::Tensor a = operand(left), b = operand(right);
  if (!in_bf16) return at::mm(left.sums_over_rows ? a.t() : a, right.sums_over_rows ? b : b.t());
  constexpr int kRowMajor = 101, kAsIs = 111, kTransposed = 112;
  const std::int64_t m = a.size(left.sums_over_rows ? 1 : 0), n = b.size(right.sums_over_rows ? 1 : 0);
  const std::int64_t k = a.size(left.sums_over_rows ? 0 : 1);
  at::Tensor c = at::empty({m, n}, a.options().dtype(at::kFloat));
  if (m == 0 || n == 0) return c;
  if (k == 0) return c.zero_();
  cblas_gemm_bf16bf16f32(kRowMajor, left.sums_over_rows ? kTransposed : kAsIs,
                         right.sums_over_rows ? kAsIs : kTransposed, static_cast<int>(m), static_cast<int>(n),
                         static_cast<int>(k), 1, a.const_data_ptr(), static_cast<int>(a.stride(0)),
                         b.const_data_ptr(), static_cast<int>(b.stride(0)), 0, c.mutable_data_ptr<float>(),
                         static_cast<int>(n));
  return c;
}

}  // namespace

at::Tensor hadamard(const at::Tensor& matrix, bool over_rows, std::uint64_t seed) {
  const at::Tensor values = over_rows ? matrix.to(at::kFloat) : matrix.to(at::kFloat).t();
  const std::int64_t groups = values.size(0) / kHadamardGroup, whole = groups * kHadamardGroup;
  // Sylvester's matrix: the sign of (i, j) is the parity of the bits that they share. A quarter of it is
  // orthogonal; the signs of the columns are random and the same for both operands.
  at::Tensor transform = at::empty({kHadamardGroup, kHadamardGroup}, values.options());
  float* elements = transform.mutable_data_ptr<float>();
  const std::uint32_t signs = random_bits({.seed = seed}, 0);
  for (std::uint32_t i = 0; i < kHadamardGroup; ++i)
    for (std::uint32_t j = 0; j < kHadamardGroup; ++j) {
      const bool negative = (std::popcount(i & j) + (signs >> j & 1)) % 2;
      elements[i * kHadamardGroup + j] = negative ? -0.25f : 0.25f;
    }
  const at::Tensor turned =
      at::matmul(transform, values.narrow(0, 0, whole).reshape({groups, kHadamardGroup, values.size(1)}))
          .reshape({whole, values.size(1)});
  const at::Tensor all =
      whole == values.size(0) ? turned : at::cat({turned, values.narrow(0, whole, values.size(0) - whole)});
  return over_rows ? all : all.t();
}

Quantised quantised(const at::Tensor& matrix, const QuantiseRequest& request, QuantiseCounts& counts) {
  const OperandRule& rule = request.rule;
  const at::Tensor source =
      readable(rule.hadamard ? hadamard(matrix, request.sums_over_rows, request.random.seed) : matrix);
  Quantised made{.codes = at::empty(source.sizes(), source.options().dtype(at::kByte)),
                 .scales = {},
                 .rule = rule,
                 .sums_over_rows = request.sums_over_rows,
                 .outer_scale = 1};
  const QuantiseInput input = input_of(source);
  if (has_one_scale(rule)) {
    quantise_with_one_scale(input, request, made, counts);
    return made;
  }
  const BlockShape block = block_of(rule, request.sums_over_rows, source);
  const auto count = [](std::size_t size, std::size_t part) {
    return part == 0 ? std::int64_t{0} : static_cast<std::int64_t>((size + part - 1) / part);
  };
  made.scales = at::empty({count(input.rows, block.rows), count(input.columns, block.columns)},
                          source.options().dtype(scale_bytes(rule.scale) == 4 ? at::kFloat : at::kByte));
  if (source.numel() > 0) quantise_blocks(input, request, block, made, counts);
  return made;
}

at::Tensor product(const Quantised& left, const Quantised& right, const at::Tensor& bias,
                   at::ScalarType output) {
  if (!left.codes.is_cpu()) return product_on_device(left, right, bias, output);
  const at::Tensor sums = bare_product(left, right);
  const std::int64_t rows = sums.size(0), columns = sums.size(1);
  const std::vector<float> of_rows = factors_across(left), of_columns = factors_across(right);
  const float outer = left.outer_scale * right.outer_scale;
  // Scales together may leave FP32's range where the result does not. Sums of codes lie between 2^-25 and, of
  // 2^20 terms, 2^45: one factor or two within these bounds keep them normal numbers.
  const bool is_one = of_rows.empty() && of_columns.empty();
  const auto is_modest = [&](float factor) {
    return is_one ? factor >= 0x1p-100f && factor <= 0x1p80f : factor >= 0x1p-50f && factor <= 0x1p40f;
  };
  const bool in_fp32 = is_modest(outer) && std::ranges::all_of(of_rows, is_modest) &&
                       std::ranges::all_of(of_columns, is_modest);
  const at::Tensor added = bias.defined() ? bias.detach().to(at::kFloat).contiguous() : at::Tensor();
  const float* addends = bias.defined() ? added.const_data_ptr<float>() : nullptr;
  const at::Tensor result =
      output == at::kFloat ? sums : at::empty(sums.sizes(), sums.options().dtype(output));
  at::parallel_for(0, rows, grain_of(columns), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      float* values = sums.mutable_data_ptr<float>() + row * columns;
      const float of_row = of_rows.empty() ? 1 : of_rows[static_cast<std::size_t>(row)];
      if (in_fp32) {
        const float factor = outer * of_row;
        for (std::int64_t i = 0; i < columns; ++i) values[i] *= factor;
        if (!of_columns.empty())
          for (std::int64_t i = 0; i < columns; ++i) values[i] *= of_columns[static_cast<std::size_t>(i)];
      } else {
        const double factor = double{left.outer_scale} * double{right.outer_scale} * double{of_row};
        for (std::int64_t i = 0; i < columns; ++i) {
          const float of_column = of_columns.empty() ? 1 : of_columns[static_cast<std::size_t>(i)];
          values[i] = static_cast<float>(double{values[i]} * factor * double{of_column});
        }
      }
      if (addends)
        for (std::int64_t i = 0; i < columns; ++i) values[i] += addends[i];
      if (output == at::kBFloat16) {
        auto* codes = static_cast<std::uint16_t*>(result.mutable_data_ptr()) + row * columns;
        kernels().update->round_bf16(values, codes, static_cast<std::size_t>(columns));
      } else if (output == at::kHalf) {
        auto* codes = static_cast<std::uint16_t*>(result.mutable_data_ptr()) + row * columns;
        cast({values, static_cast<std::size_t>(columns)}, Format::FP16, {.overflow = Overflow::NonFinite},
             codes);
      }
    }
  });
  return result;
}

at::Tensor decoded(const Quantised& matrix) {
  return decoded_codes(matrix, /*with_scales=*/true, at::kFloat).mul_(matrix.outer_scale);
}

}  // namespace halfstep
