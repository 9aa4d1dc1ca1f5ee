#include "tensor/dense_grad.h"

#include <ATen/ops/empty_like.h>
#include <halfstep/error.h>

#include "tensor/dense.h"

namespace halfstep {

void check_grad(const Param& param, const at::Tensor& grad) {
  HALFSTEP_CHECK(
      grad.layout() == at::kStrided, "the gradient of '", param.name, "' has layout ", grad.layout(),
      "; Halfstep's optimizers take dense ones. Build the embedding without sparse gradients, or use "
      "GradScaler with a torch::optim optimizer.");
  HALFSTEP_CHECK(grad.device().is_cpu(), "the gradient of '", param.name, "' is on ", grad.device(),
                 ", its parameter on the CPU.");
  HALFSTEP_CHECK(training_format(grad.scalar_type()), "the gradient of '", param.name, "' is ",
                 grad.scalar_type(), "; Halfstep's optimizers take Float, BFloat16 and Half.");
  HALFSTEP_CHECK(grad.sizes() == param.working.sizes(), "the gradient of '", param.name, "' has shape ",
                 grad.sizes(), ", its parameter ", param.working.sizes(), ".");
}

at::Tensor grad_laid_out_as(const at::Tensor& working, const at::Tensor& grad) {
  if (grad.is_non_overlapping_and_dense() && same_layout(working, grad)) return grad;
  return at::empty_like(working, working.options().dtype(grad.scalar_type()).requires_grad(false))
      .copy_(grad);
}

}  // namespace halfstep
