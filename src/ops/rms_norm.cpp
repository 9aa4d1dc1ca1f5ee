// RMS norm of BF16 or FP16 rows, computed in FP32 without an FP32 copy of them: one pass over the rows where
// LibTorch makes eight. Backward keeps the rows as they are and one FP32 number a row, and rounds each
// gradient once.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "kernels/norm.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gains' gradient is summed in so many parts at most, whatever the number of threads: the same bits.
constexpr int64_t kMostParts = 64, kLeastRows = 16;

int64_t rows_of(const at::Tensor& tensor) { return tensor.numel() / tensor.size(-1); }

/// The rows from `first` on.
NormInput rows_from(const at::Tensor& input, const at::Tensor& gain, int64_t first, int64_t count) {
  const int64_t columns = input.size(-1);
  return {.format = input.scalar_type() == at::kBFloat16 ? Format::BF16 : Format::FP16,
          .values = static_cast<const uint16_t*>(input.const_data_ptr()) + first * columns,
          .rows = static_cast<std::size_t>(count),
          .columns = static_cast<std::size_t>(columns),
          .gain = gain.const_data_ptr<float>()};
}

class LowRowsRmsNorm : public torch::autograd::Function<LowRowsRmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& gain,
                            double eps) {
    const auto options = input.options().dtype(at::kFloat);
    const at::Tensor output = at::empty(input.sizes(), options);
    const at::Tensor inverse_rms = at::empty({rows_of(input)}, options);
    auto* const values = output.mutable_data_ptr<float>();
    auto* const factors = inverse_rms.mutable_data_ptr<float>();
    at::parallel_for(0, rows_of(input), kLeastRows, [&](int64_t begin, int64_t end) {
      rms_norm(rows_from(input, gain, begin, end - begin), eps, values + begin * input.size(-1),
               factors + begin);
    });
    context->save_for_backward({input, gain, inverse_rms});
    context->saved_data["eps"] = eps;
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor grads = output_grads[0].to(at::kFloat).contiguous();
    if (at::GradMode::is_enabled())
      return differentiable_gradients(saved[0], saved[1], grads, context->saved_data["eps"].toDouble());
    // An operation of LibTorch's on the weight: where weights are sharded, it brings them.
    return gradients(saved[0], at::alias(saved[1]), saved[2], grads);
  }

 private:
  static variable_list gradients(const at::Tensor& saved_input, const at::Tensor& gain,
                                 const at::Tensor& inverse_rms, const at::Tensor& grads) {
    const at::Tensor input = saved_input.contiguous();  // a packer may have given it back in another order
    const int64_t rows = rows_of(input), columns = input.size(-1);
    const int64_t part_rows = std::max(kLeastRows, (rows + kMostParts - 1) / kMostParts);
    const int64_t parts = (rows + part_rows - 1) / part_rows;
    const at::Tensor input_grads = at::empty_like(input);
    const at::Tensor gain_grads = at::zeros({parts, columns}, gain.options());
    auto* const of_input = static_cast<uint16_t*>(input_grads.mutable_data_ptr());
    auto* const of_gain = gain_grads.mutable_data_ptr<float>();
    at::parallel_for(0, parts, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t first = part * part_rows, count = std::min(part_rows, rows - first);
        rms_norm_backward(rows_from(input, gain, first, count), inverse_rms.const_data_ptr<float>() + first,
                          grads.const_data_ptr<float>() + first * columns, of_input + first * columns,
                          of_gain + part * columns);
      }
    });
    return {input_grads, gain_grads.sum(0), {}};
  }

  /// The same in operations that can be differentiated again, with all the memory that this takes.
  static variable_list differentiable_gradients(const at::Tensor& input, const at::Tensor& gain,
                                                const at::Tensor& grads, double eps) {
    const at::Tensor values = input.to(at::kFloat);
    const at::Tensor factor = ((values * values).mean(-1, /*keepdim=*/true) + eps).rsqrt();
    const at::Tensor normed = values * factor, of_normed = grads * gain;
    const at::Tensor along = (of_normed * normed).mean(-1, /*keepdim=*/true);
    return {(factor * (of_normed - normed * along)).to(input.scalar_type()),
            (grads * normed).reshape({-1, gain.size(0)}).sum(0),
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

/// Dense rows of BF16 or FP16 on the CPU, normed over the last dimension.
bool takes(OpArguments given) {
  const RmsNormArguments arguments(given);
  const at::Tensor& input = arguments.input;
  if (!is_low(input) || !kernels_serve(input) || !is_plain(input) || !input.is_contiguous() ||
      input.numel() == 0 || input.dim() == 0)
    return false;
  const at::IntArrayRef row = input.sizes().slice(input.dim() - 1);
  if (row != at::IntArrayRef(arguments.normalized_shape)) return false;
  const auto& gain = arguments.gain;
  return !gain || (gain->is_cpu() && is_plain(*gain) && gain->sizes() == row &&
                   (gain->scalar_type() == at::kFloat || is_low(*gain)));
}

/// The FP32 output, as stock computes it from an FP32 copy, but with sums in FP64.
at::Tensor run(OpArguments given) {
  const RmsNormArguments arguments(given);
  const auto fp32 = arguments.input.options().dtype(at::kFloat);
  const at::Tensor gain = arguments.gain ? arguments.gain->to(at::kFloat).contiguous()
                                         : at::ones({arguments.input.size(-1)}, fp32);
  return LowRowsRmsNorm::apply(arguments.input, gain,
                               arguments.eps.value_or(std::numeric_limits<float>::epsilon()));
}

}  // namespace

OwnOp low_rows_rms_norm() {
  return {.op = "rms_norm",
          .rule = OpRule::Fp32,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = run};
}

}  // namespace halfstep
