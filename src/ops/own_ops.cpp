#include "ops/own_ops.h"

#include <ATen/TensorSubclassLikeUtils.h>

namespace halfstep {

// Made at the first call, so that a row is there whoever asks while the library is loaded.
std::span<const OwnOp> own_ops() {
  static const OwnOp table[] = {
      low_gelu(),
      low_layer_norm_function(),
      low_logits_cross_entropy(),
      low_narrow_convolution(),
      low_rms_norm_function(),
      low_rotary(),
      low_rows_attention(),
      low_rows_layer_norm(),
      low_rows_rms_norm(),
      low_swiglu(),
      quantised_addmm(),
      quantised_linear(),
      quantised_matmul(),
      quantised_mm(),
      low_addmm(),
      low_linear(),
      low_matmul(),
      low_mm(),
  };
  return table;
}

std::vector<const OwnOp*> own_ops_of(std::string_view op) {
  std::vector<const OwnOp*> found;
  for (const OwnOp& each : own_ops())
    if (each.op == op) found.push_back(&each);
  return found;
}

bool is_low(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !at::isTensorSubclassLike(tensor) && !tensor.is_neg() &&
         !tensor._is_zerotensor() && !tensor._fw_grad(/*level=*/0).defined();
}

std::optional<at::Tensor> given_tensor(const c10::IValue& argument) {
  auto tensor = argument.toOptional<at::Tensor>();
  if (tensor && !tensor->defined()) tensor.reset();
  return tensor;
}

}  // namespace halfstep
