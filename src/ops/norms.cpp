// RMS norm and layer norm of BF16 or FP16 rows, computed in FP32 without an FP32 copy of them: one pass over
// the rows where LibTorch makes several. Backward keeps the rows as they are and one FP32 number a row, and
// rounds each gradient once. The output of aten::rms_norm is FP32, that of halfstep::rms_norm and
// halfstep::layer_norm has the type of the rows.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "kernels/norm.h"
#include "ops/defined_op.h"
#include "ops/low_elements.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradients of gain and bias are summed in so many parts at most, whatever the number of threads: the
// same bits.
constexpr int64_t kMostParts = 64, kLeastRows = 16;

int64_t rows_of(const at::Tensor& tensor) { return tensor.numel() / tensor.size(-1); }

/// The rows from `first` on. `bias` is undefined for RMS norm.
NormInput rows_from(const at::Tensor& input, const at::Tensor& gain, const at::Tensor& bias, int64_t first,
                    int64_t count) {
  const int64_t columns = input.size(-1);
  return {.format = low_format(input),
          .values = low_elements(input, first * columns),
          .rows = static_cast<std::size_t>(count),
          .columns = static_cast<std::size_t>(columns),
          .gain = gain.const_data_ptr<float>(),
          .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr};
}

/// FP32, or that of BF16 and FP16 tensors.
Format format_of(const at::Tensor& tensor) { return is_low(tensor) ? low_format(tensor) : Format::FP32; }

template <typename Bytes>
Bytes* elements(Bytes* data, const at::Tensor& of, int64_t first) {
  using Byte = std::conditional_t<std::is_const_v<Bytes>, const std::byte, std::byte>;
  return static_cast<Byte*>(data) + first * static_cast<int64_t>(of.element_size());
}

/// With a bias it is layer norm, without one RMS norm.
class LowRowsNorm : public torch::autograd::Function<LowRowsNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& gain,
                            const std::optional<at::Tensor>& given_bias, double eps,
                            at::ScalarType output_type) {
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const at::Tensor output = at::empty(input.sizes(), input.options().dtype(output_type));
    const at::Tensor inverse = at::empty({rows_of(input)}, input.options().dtype(at::kFloat));
    void* const values = output.mutable_data_ptr();
    auto* const factors = inverse.mutable_data_ptr<float>();
    at::parallel_for(0, rows_of(input), kLeastRows, [&](int64_t begin, int64_t end) {
      norm(rows_from(input, gain, bias, begin, end - begin), eps, format_of(output),
           elements(values, output, begin * input.size(-1)), factors + begin);
    });
    context->save_for_backward({input, gain, bias, inverse});
    context->saved_data["eps"] = eps;
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &gain = saved[1], &bias = saved[2];
    const at::Tensor grads = output_grads[0].contiguous();
    if (at::GradMode::is_enabled() || !is_plain(grads))
      return differentiable_gradients(input, gain, bias.defined(), grads.to(at::kFloat),
                                      context->saved_data["eps"].toDouble());
    // Operations of LibTorch's on the weights: where these are sharded, that brings them.
    return gradients(input, at::alias(gain), bias.defined() ? at::alias(bias) : bias, saved[3], grads);
  }

 private:
  static variable_list gradients(const at::Tensor& saved_input, const at::Tensor& gain,
                                 const at::Tensor& bias, const at::Tensor& inverse, const at::Tensor& grads) {
    const at::Tensor input = saved_input.contiguous();  // a packer may have given it back in another order
    const int64_t rows = rows_of(input), columns = input.size(-1);
    const int64_t part_rows = std::max(kLeastRows, (rows + kMostParts - 1) / kMostParts);
    const int64_t parts = (rows + part_rows - 1) / part_rows;
    const at::Tensor input_grads = at::empty_like(input);
    const at::Tensor gain_grads = at::zeros({parts, columns}, gain.options());
    const at::Tensor bias_grads = bias.defined() ? at::zeros_like(gain_grads) : at::Tensor();
    auto* const of_input = input_grads.mutable_data_ptr();
    auto* const of_gain = gain_grads.mutable_data_ptr<float>();
    auto* const of_bias = bias.defined() ? bias_grads.mutable_data_ptr<float>() : nullptr;
    at::parallel_for(0, parts, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t first = part * part_rows, count = std::min(part_rows, rows - first);
        norm_backward(rows_from(input, gain, bias, first, count), inverse.const_data_ptr<float>() + first,
                      format_of(grads), elements(grads.const_data_ptr(), grads, first * columns),
                      {.of_input = low_elements(of_input, first * columns),
                       .of_gain = of_gain + part * columns,
                       .of_bias = of_bias == nullptr ? nullptr : of_bias + part * columns});
      }
    });
    return {input_grads, gain_grads.sum(0), bias.defined() ? bias_grads.sum(0) : bias, {}, {}};
  }

  /// The same in operations that can be differentiated again, with all the memory that this takes.
  static variable_list differentiable_gradients(const at::Tensor& input, const at::Tensor& gain,
                                                bool is_layer_norm, const at::Tensor& grads, double eps) {
    const auto mean = [](const at::Tensor& tensor) { return tensor.mean(-1, /*keepdim=*/true); };
    const auto over_rows = [&](const at::Tensor& tensor) {
      return tensor.reshape({-1, gain.size(0)}).sum(0);
    };
    at::Tensor values = input.to(at::kFloat);
    if (is_layer_norm) values = values - mean(values);
    const at::Tensor factor = (mean(values * values) + eps).rsqrt();
    const at::Tensor normed = values * factor, of_normed = grads * gain;
    at::Tensor of_values = of_normed - normed * mean(of_normed * normed);
    if (is_layer_norm) of_values = of_values - mean(of_normed);
    return {(factor * of_values).to(input.scalar_type()),
            over_rows(grads * normed),
            is_layer_norm ? over_rows(grads) : at::Tensor(),
            {},
            {}};
  }
};

/// The arguments of aten::rms_norm.
struct RmsNormArguments {
  explicit RmsNormArguments(OpArguments given)
      : input(given[0].toTensor()),
        normalized_shape(given[1].toDimVector()),
        gain(given_tensor(given[2])),
        eps(given[3].toOptional<double>()) {}

  const at::Tensor& input;
  at::DimVector normalized_shape;
  std::optional<at::Tensor> gain;
  std::optional<double> eps;
};

bool are_low_rows(const at::Tensor& input) {
  return is_low(input) && kernels_serve(input) && is_plain(input) && input.is_contiguous() &&
         input.numel() > 0 && input.dim() > 0;
}

/// A gain or a bias.
bool is_of_columns(const at::Tensor& input, const at::Tensor& given) {
  return given.is_cpu() && is_plain(given) && given.sizes() == input.sizes().slice(input.dim() - 1) &&
         (given.scalar_type() == at::kFloat || is_low(given));
}

at::Tensor fp32(const at::Tensor& of_columns) { return of_columns.to(at::kFloat).contiguous(); }

/// Dense rows of BF16 or FP16 on the CPU, normed over the last dimension.
bool takes(OpArguments given) {
  const RmsNormArguments arguments(given);
  const at::Tensor& input = arguments.input;
  return are_low_rows(input) &&
         input.sizes().slice(input.dim() - 1) == at::IntArrayRef(arguments.normalized_shape) &&
         (!arguments.gain || is_of_columns(input, *arguments.gain));
}

/// The FP32 output, as stock computes it from an FP32 copy, but with sums in FP64.
at::Tensor run(OpArguments given) {
  const RmsNormArguments arguments(given);
  const at::Tensor gain =
      arguments.gain ? fp32(*arguments.gain)
                     : at::ones({arguments.input.size(-1)}, arguments.input.options().dtype(at::kFloat));
  return LowRowsNorm::apply(arguments.input, gain, std::optional<at::Tensor>(),
                            arguments.eps.value_or(std::numeric_limits<float>::epsilon()), at::kFloat);
}

// In a scope the rows of these operations make FP32 of low rows.
at::Tensor rms_norm_chain(const at::Tensor& x, const at::Tensor& gain, double eps) {
  return at::rms_norm(x, gain.sizes(), gain, eps).to(x.scalar_type());
}

at::Tensor layer_norm_chain(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps) {
  return at::layer_norm(x, gain.sizes(), gain, bias, eps).to(x.scalar_type());
}

/// Of a function of halfstep/functions.h: the rows, then what has one number a column.
bool takes_rows(OpArguments rows_and_columns) {
  const at::Tensor& input = rows_and_columns[0].toTensor();
  return are_low_rows(input) &&
         std::ranges::all_of(rows_and_columns.subspan(1), [&](const c10::IValue& given) {
           return is_of_columns(input, given.toTensor());
         });
}

at::Tensor run_rms_norm(OpArguments given) {
  const at::Tensor& input = given[0].toTensor();
  return LowRowsNorm::apply(input, fp32(given[1].toTensor()), std::optional<at::Tensor>(),
                            given[2].toDouble(), input.scalar_type());
}

at::Tensor run_layer_norm(OpArguments given) {
  const at::Tensor& input = given[0].toTensor();
  return LowRowsNorm::apply(input, fp32(given[1].toTensor()), std::optional(fp32(given[2].toTensor())),
                            given[3].toDouble(), input.scalar_type());
}

}  // namespace

OwnOp low_rows_rms_norm() {
  return {.op = "rms_norm",
          .rule = OpRule::Fp32,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = run};
}

OwnOp low_rms_norm_function() {
  static const auto definition =
      defined("rms_norm(Tensor x, Tensor gain, float eps) -> Tensor", rms_norm_chain);
  return {.op = "halfstep::rms_norm",
          .rule = OpRule::AsIs,
          .takes = [](OpArguments given, const OpContext&) { return takes_rows(given.first(2)); },
          .run = [](OpArguments given, const OpContext&) { return run_rms_norm(given); },
          .run_again = run_rms_norm};
}

OwnOp low_layer_norm_function() {
  static const auto definition =
      defined("layer_norm(Tensor x, Tensor gain, Tensor bias, float eps) -> Tensor", layer_norm_chain);
  return {.op = "halfstep::layer_norm",
          .rule = OpRule::AsIs,
          .takes = [](OpArguments given, const OpContext&) { return takes_rows(given.first(3)); },
          .run = [](OpArguments given, const OpContext&) { return run_layer_norm(given); },
          .run_again = run_layer_norm};
}

}  // namespace halfstep
