// halfstep::swiglu: silu(gate) * up. Of BF16 or FP16 tensors on the CPU one pass, computed in FP32 and
// rounded once; backward keeps both inputs, computes the rest again and rounds each gradient once. Everything
// else is two operations of LibTorch's.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/pointwise.h"
#include "ops/defined_op.h"
#include "ops/low_elements.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kLeastElements = int64_t{1} << 15;  // for a thread

at::Tensor chain(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

class LowSwiglu : public torch::autograd::Function<LowSwiglu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::Tensor output = at::empty_like(gate);
    auto* const made = output.mutable_data_ptr();
    at::parallel_for(0, gate.numel(), kLeastElements, [&](int64_t begin, int64_t end) {
      swiglu(low_format(gate), low_elements(gate, begin), low_elements(up, begin), low_elements(made, begin),
             static_cast<std::size_t>(end - begin));
    });
    context->save_for_backward({gate, up});
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    const variable_list saved = context->get_saved_variables();
    if (at::GradMode::is_enabled() || !is_plain(output_grads[0]))
      return differentiable_gradients(saved[0], saved[1], output_grads[0]);
    // A packer may have given them back in another order.
    const at::Tensor gate = saved[0].contiguous(), up = saved[1].contiguous();
    const at::Tensor grad = output_grads[0].contiguous();
    const at::Tensor gate_grad = at::empty_like(gate), up_grad = at::empty_like(up);
    auto* const of_gate = gate_grad.mutable_data_ptr();
    auto* const of_up = up_grad.mutable_data_ptr();
    at::parallel_for(0, gate.numel(), kLeastElements, [&](int64_t begin, int64_t end) {
      swiglu_backward(low_format(gate), low_elements(gate, begin), low_elements(up, begin),
                      low_elements(grad, begin), low_elements(of_gate, begin), low_elements(of_up, begin),
                      static_cast<std::size_t>(end - begin));
    });
    return {gate_grad, up_grad};
  }

 private:
  /// The same in operations that can be differentiated again, with all the memory that this takes.
  static variable_list differentiable_gradients(const at::Tensor& gate, const at::Tensor& up,
                                                const at::Tensor& output_grad) {
    const at::Tensor x = gate.to(at::kFloat), grad = output_grad.to(at::kFloat);
    const at::Tensor passed = at::sigmoid(x);
    return {(grad * up.to(at::kFloat) * (passed * (1 + x * (1 - passed)))).to(gate.scalar_type()),
            (grad * (x * passed)).to(up.scalar_type())};
  }
};

/// Two dense tensors of one low type and size on the CPU.
bool takes(OpArguments given) {
  const at::Tensor &gate = given[0].toTensor(), &up = given[1].toTensor();
  return is_low(gate) && up.scalar_type() == gate.scalar_type() && kernels_serve(gate) && up.is_cpu() &&
         is_plain(gate) && is_plain(up) && gate.is_contiguous() && up.is_contiguous() && gate.numel() > 0 &&
         gate.sizes() == up.sizes();
}

at::Tensor run(OpArguments given) { return LowSwiglu::apply(given[0].toTensor(), given[1].toTensor()); }

}  // namespace

OwnOp low_swiglu() {
  static const auto definition = defined("swiglu(Tensor gate, Tensor up) -> Tensor", chain);
  return {.op = "halfstep::swiglu",
          .rule = OpRule::AsIs,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = run,
          .inputs = 2};
}

}  // namespace halfstep
