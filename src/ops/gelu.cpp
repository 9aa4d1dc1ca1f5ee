// GELU by tanh of BF16 or FP16 tensors on the CPU: one pass, computed in FP32 and rounded once. Backward
// keeps the input and rounds the gradient once. GELU by erf is LibTorch's, whose forward pass is faster than
// ours was.
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/pointwise.h"
#include "ops/low_elements.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kLeastElements = int64_t{1} << 15;  // for a thread

class LowGelu : public torch::autograd::Function<LowGelu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor output = at::empty_like(x);
    auto* const made = output.mutable_data_ptr();
    at::parallel_for(0, x.numel(), kLeastElements, [&](int64_t begin, int64_t end) {
      gelu(low_format(x), low_elements(x, begin), low_elements(made, begin),
           static_cast<std::size_t>(end - begin));
    });
    context->save_for_backward({x});
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    const at::Tensor saved = context->get_saved_variables()[0];
    if (at::GradMode::is_enabled() || !is_plain(output_grads[0])) {
      // In operations that can be differentiated again.
      return {at::gelu_backward(output_grads[0].to(at::kFloat), saved.to(at::kFloat), "tanh")
                  .to(saved.scalar_type())};
    }
    const at::Tensor x = saved.contiguous();  // a packer may have given it back in another order
    const at::Tensor grad = output_grads[0].contiguous(), x_grad = at::empty_like(x);
    auto* const made = x_grad.mutable_data_ptr();
    at::parallel_for(0, x.numel(), kLeastElements, [&](int64_t begin, int64_t end) {
      gelu_backward(low_format(x), low_elements(x, begin), low_elements(grad, begin),
                    low_elements(made, begin), static_cast<std::size_t>(end - begin));
    });
    return {x_grad};
  }
};

bool takes(OpArguments given) {
  const at::Tensor& x = given[0].toTensor();
  return is_low(x) && kernels_serve(x) && is_plain(x) && !x.is_nested() && x.is_contiguous() &&
         x.numel() > 0 && given[1].toStringRef() == "tanh";
}

at::Tensor run(OpArguments given) { return LowGelu::apply(given[0].toTensor()); }

}  // namespace

OwnOp low_gelu() {
  return {.op = "gelu",
          .rule = OpRule::AsIs,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = run};
}

}  // namespace halfstep
