// halfstep::rotary: rotary positions as Hugging Face has them, element i of the first half of a head turned
// with element i of its second half. Of BF16 or FP16 heads on the CPU one pass, computed in FP32 and rounded
// once, that reads the heads where a product has left them. Everything else is a chain of LibTorch's
// operations with the same bits.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "kernels/pointwise.h"
#include "ops/defined_op.h"
#include "ops/low_elements.h"
#include "ops/own_ops.h"
#include "tensor/saved_tensors.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kLeastElements = int64_t{1} << 15;  // for a thread

/// In the wider type of `x` and the angles, rounded once to that of `x`.
at::Tensor chain(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  const at::Tensor quarter_turn = at::cat({-halves[1], halves[0]}, -1);
  return (x * cos + quarter_turn * sin).to(x.scalar_type());
}

/// Whether the heads of a position lie beside each other, as products before and behind attention have them.
bool heads_lie_together(const at::Tensor& x) { return x.stride(1) <= x.stride(2); }

at::Tensor empty_heads(const at::Tensor& like, bool together) {
  if (!together) return at::empty(like.sizes(), like.options());
  // Not a view: a program may write to what it is given.
  const int64_t columns = like.size(3), row = like.size(1) * columns;
  return at::empty_strided(like.sizes(), {like.size(2) * row, columns, row, 1}, like.options());
}

at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool together,
                  decltype(&rotate) turn) {
  const at::Tensor output = empty_heads(x, together);
  const int64_t heads = x.size(1), length = x.size(2), columns = x.size(3);
  const bool by_text = cos.dim() == 4 && cos.size(0) > 1;
  const float *const cosines = cos.const_data_ptr<float>(), *const sines = sin.const_data_ptr<float>();
  auto* const made = output.mutable_data_ptr();
  const int64_t least_positions = std::max<int64_t>(1, kLeastElements / (heads * columns));
  at::parallel_for(0, x.size(0) * length, least_positions, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t text = row / length, position = row % length;
      const int64_t angles = (by_text ? row : position) * columns;
      const auto place = [&](const at::Tensor& t) { return text * t.stride(0) + position * t.stride(2); };
      turn({.format = low_format(x),
            .values = low_elements(x, place(x)),
            .stride = static_cast<std::size_t>(x.stride(1)),
            .output = low_elements(made, place(output)),
            .output_stride = static_cast<std::size_t>(output.stride(1)),
            .rows = static_cast<std::size_t>(heads),
            .columns = static_cast<std::size_t>(columns)},
           cosines + angles, sines + angles, kernels());
    }
  });
  return output;
}

class LowRotary : public torch::autograd::Function<LowRotary> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    const bool together = heads_lie_together(x);
    context->save_for_backward({cos, sin});
    context->saved_data["together"] = together;
    return turned(x, cos, sin, together, rotate);
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& grad = output_grads[0];
    if (at::GradMode::is_enabled() || !is_plain(grad))
      return {differentiable_gradient(grad, saved[0], saved[1]), {}, {}};
    const at::Tensor rows = grad.stride(3) == 1 ? grad : grad.contiguous();
    return {turned(rows, saved[0].contiguous(), saved[1].contiguous(),
                   context->saved_data["together"].toBool(), rotate_back),
            {},
            {}};
  }

 private:
  /// The same in operations that can be differentiated again.
  static at::Tensor differentiable_gradient(const at::Tensor& grad, const at::Tensor& cos,
                                            const at::Tensor& sin) {
    const auto halves = (grad * sin).chunk(2, -1);
    return (grad * cos + at::cat({halves[1], -halves[0]}, -1)).to(grad.scalar_type());
  }
};

/// [batch, heads, length, head size] of low elements, and FP32 angles of [length, head size] or
/// [batch, 1, length, head size] that get no gradient.
bool takes(OpArguments given) {
  const at::Tensor& x = given[0].toTensor();
  if (!is_low(x) || !kernels_serve(x) || !is_plain(x) || x.dim() != 4 || x.numel() == 0 || x.stride(3) != 1 ||
      x.size(3) % 2 != 0)
    return false;
  const int64_t batch = x.size(0), length = x.size(2), columns = x.size(3);
  const auto covers = [&](const at::Tensor& angles) {
    return angles.scalar_type() == at::kFloat && angles.is_cpu() && is_plain(angles) &&
           angles.is_contiguous() && !angles.requires_grad() &&
           (angles.sizes() == at::IntArrayRef{length, columns} ||
            angles.sizes() == at::IntArrayRef{batch, 1, length, columns});
  };
  const at::Tensor &cos = given[1].toTensor(), &sin = given[2].toTensor();
  return covers(cos) && covers(sin) && cos.sizes() == sin.sizes();
}

at::Tensor run(OpArguments given) {
  const ExactSavedTensors exact;  // one table for all layers: codes of it in each would be no saving
  return LowRotary::apply(given[0].toTensor(), given[1].toTensor(), given[2].toTensor());
}

}  // namespace

OwnOp low_rotary() {
  static const auto definition = defined("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", chain);
  return {.op = "halfstep::rotary",
          .rule = OpRule::AsIs,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = nullptr};  // attention keeps what it is given
}

}  // namespace halfstep
