#include "quant/on_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace halfstep {
namespace {

// The kernels of CUDA's libraries read FP8 by 16 bytes.
constexpr std::int64_t kMultipleOf = 16;
constexpr std::int64_t kExponentBits = 0x7f800000;

bool has_row_scales(const OperandRule& rule) { return rule.block_along == 0 && rule.block_across == 1; }

at::ScalarType type_of(Format format) {
  HALFSTEP_CHECK(format == Format::E4M3 || format == Format::E5M2, "on an accelerator there are no codes of ",
                 traits(format).name, ". Use E4M3 or E5M2.");
  return format == Format::E4M3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

/// What values are multiplied by: as block_scale has it, operation for operation.
at::Tensor encode_scale(const at::Tensor& amax, const OperandRule& rule) {
  const at::Tensor one = at::full({}, 1.0f, amax.options());
  if (rule.scale == ScaleRule::Unscaled) return one.expand_as(amax);
  const at::Tensor held = amax.to(at::kDouble).clamp_min(kLeastAmax);
  at::Tensor scale = at::full({}, traits(rule.format).max, held.options()).div(held).to(at::kFloat);
  if (rule.scale == ScaleRule::PowerOfTwo)
    scale = scale.view(at::kInt).bitwise_and(kExponentBits).view(at::kFloat);
  return at::where(at::isfinite(amax), scale, one);
}

/// Zeros added behind rows and columns until both are multiples of 16.
at::Tensor padded(const at::Tensor& codes, bool rows_too) {
  const auto missing = [](std::int64_t size) { return (kMultipleOf - size % kMultipleOf) % kMultipleOf; };
  at::Tensor bytes = codes.view(at::kByte);
  if (const auto columns = missing(bytes.size(1)); columns > 0)
    bytes = at::cat({bytes, at::zeros({bytes.size(0), columns}, bytes.options())}, 1);
  if (const auto rows = missing(bytes.size(0)); rows_too && rows > 0)
    bytes = at::cat({bytes, at::zeros({rows, bytes.size(1)}, bytes.options())}, 0);
  return bytes.view(codes.scalar_type());
}

/// [n, sum] without gaps.
at::Tensor rows_along_the_sum(const Quantised& matrix) {
  return matrix.sums_over_rows ? matrix.codes.t().contiguous() : matrix.codes;
}

}  // namespace

void check_runs_on_device(const Recipe& recipe, const at::Device& device) {
  for (const ProductRule* product : {&recipe.forward, &recipe.input_grad, &recipe.weight_grad}) {
    if (!product->quantised) continue;
    for (const OperandRule* rule : {&product->left, &product->right})
      HALFSTEP_CHECK(
          (has_one_scale(*rule) || has_row_scales(*rule)) && !rule->hadamard && !rule->stochastic &&
              rule->format != Format::E2M1 &&
              (rule->scale == ScaleRule::Fp32 || rule->scale == ScaleRule::PowerOfTwo ||
               rule->scale == ScaleRule::Unscaled),
          "MixedPrecision: recipe ", recipe.name, " and a model on ", device,
          ". Products run there by at::_scaled_mm: one FP32 or power-of-two scale for each tensor or "
          "row, FP8 rounded to nearest. Use Precision::fp8_delayed(), fp8_current() or fp8_rowwise(), "
          "or study ",
          recipe.name, " on the CPU.");
  }
}

at::Tensor largest_on_device(const at::Tensor& matrix, const OperandRule& rule, bool sums_over_rows) {
  const at::Tensor values = matrix.detach();
  if (values.numel() == 0) return at::zeros({}, values.options().dtype(at::kFloat));
  const double infinity = std::numeric_limits<double>::infinity();
  if (has_one_scale(rule)) return at::linalg_vector_norm(values, infinity, {}, /*keepdim=*/false, at::kFloat);
  return at::linalg_vector_norm(values, infinity, at::IntArrayRef{sums_over_rows ? 0 : 1}, /*keepdim=*/true,
                                at::kFloat);
}

Quantised quantised_on_device(const at::Tensor& matrix, const OperandRule& rule, bool sums_over_rows,
                              const at::Tensor& amax, int margin) {
  const at::Tensor values = matrix.detach().to(at::kFloat);
  const at::Tensor scale = encode_scale(amax, rule);
  const float by_margin = std::ldexp(1.0f, margin);
  const at::Tensor products = values * (margin == 0 ? scale : scale / by_margin);
  const double max = traits(rule.format).max;
  const at::Tensor held = products.clamp(-max, max);
  // A cast to E4M3 makes 448 of an infinite number: it must be seen, and becomes NaN.
  const at::Tensor visible = at::where(at::isfinite(values), held, products - products);
  return {.codes = visible.to(type_of(rule.format)).contiguous(),
          .scales = margin == 0 ? scale.reciprocal() : scale.reciprocal() * by_margin,
          .rule = rule,
          .sums_over_rows = sums_over_rows,
          .outer_scale = 1};
}

at::Tensor product_on_device(const Quantised& left, const Quantised& right, const at::Tensor& bias,
                             at::ScalarType output) {
  const at::Tensor a = rows_along_the_sum(left), b = rows_along_the_sum(right);
  const bool by_rows = has_row_scales(left.rule) || has_row_scales(right.rule);
  const std::int64_t m = a.size(0), n = b.size(0);
  if (m == 0 || n == 0 || a.size(1) == 0) {
    const at::Tensor nothing = at::zeros({m, n}, a.options().dtype(output));
    return bias.defined() ? nothing + bias.detach().to(output) : nothing;
  }
  const at::Tensor a16 = padded(a, /*rows_too=*/false), b16 = padded(b, /*rows_too=*/true);
  at::Tensor scale_a = left.scales, scale_b = right.scales, bias16;
  if (by_rows) {
    scale_a = scale_a.reshape({-1, 1}).expand({m, 1}).contiguous();
    scale_b = scale_b.reshape({-1}).expand({n});
    if (b16.size(0) > n) scale_b = at::cat({scale_b, at::zeros({b16.size(0) - n}, scale_b.options())});
    scale_b = scale_b.reshape({1, -1}).contiguous();
  }
  // With a scale for each row CUDA's kernel writes BF16, and none adds a bias to FP32.
  const at::ScalarType written = by_rows ? at::kBFloat16 : output;
  const bool adds_bias = bias.defined() && written != at::kFloat;
  if (adds_bias) {
    bias16 = bias.detach().to(written);
    if (b16.size(0) > n) bias16 = at::cat({bias16, at::zeros({b16.size(0) - n}, bias16.options())});
  }
  at::Tensor result = at::_scaled_mm(a16, b16.t(), scale_a, scale_b,
                                     adds_bias ? std::optional(bias16) : std::nullopt, {}, written);
  if (b16.size(0) > n) result = result.narrow(1, 0, n).contiguous();
  if (bias.defined() && !adds_bias) result = result + bias.detach().to(written);
  return result.to(output);
}

at::Tensor AmaxHistoryOnDevice::amax(const DelayedScaling& options, const at::Tensor& own) const {
  if (!past_.defined()) return own;
  const at::Tensor known =
      options.take == DelayedScaling::Take::MostRecent ? past_.select(0, past_.size(0) - 1) : past_.max();
  return at::where(known < 0, own, known);
}

void AmaxHistoryOnDevice::note(const at::Tensor& amax) {
  this_step_ = this_step_.defined() ? at::maximum(this_step_, amax) : amax;
}

void AmaxHistoryOnDevice::end_step(const at::Tensor& skipped, std::int64_t length) {
  if (!this_step_.defined()) return;
  const c10::InferenceMode as_for_training(false);  // what is made here outlives an evaluation
  if (!past_.defined()) past_ = at::full({length}, kNoAmax, this_step_.options());
  const at::Tensor longer = at::cat({past_, this_step_.reshape({1})}).narrow(0, 1, length);
  past_ = at::where(at::isfinite(this_step_).logical_and(this_step_ > 0).logical_and(skipped == 0), longer,
                    past_);
  this_step_.reset();
}

at::Tensor AmaxHistoryOnDevice::saved() const {
  const at::Tensor none = at::full({1}, kNoAmax, at::kFloat);
  const at::Tensor past = past_.defined() ? past_.to(at::kCPU) : at::zeros({0}, at::kFloat);
  return at::cat(
      {past.masked_select(past >= 0), this_step_.defined() ? this_step_.to(at::kCPU).reshape({1}) : none});
}

void AmaxHistoryOnDevice::load(const at::Tensor& saved, std::int64_t length, const at::Device& device) {
  const std::int64_t all = saved.numel() - 1, known = std::min(all, length);
  const at::Tensor host = saved.to(at::kCPU);
  past_ = at::cat({at::full({length - known}, kNoAmax, host.options()), host.narrow(0, all - known, known)})
              .to(device);
  const at::Tensor last = host.narrow(0, all, 1).reshape({});
  this_step_ = last.item<float>() == kNoAmax ? at::Tensor() : last.to(device);
}

}  // namespace halfstep
