// The gradient of a parameter as an array that lies as the parameter does.
#pragma once

#include <halfstep/params.h>

namespace halfstep {

/// An Error by name for a gradient that the kernels cannot read: sparse, FP64, another shape or device.
void check_grad(const Param& param, const at::Tensor& grad);

/// The gradient itself where it is laid out as the working copy, else a copy that is. LibTorch's own fused
/// optimizers read a transposed gradient as if it were not (2.13; tests/optim/layout_test.cpp).
at::Tensor grad_laid_out_as(const at::Tensor& working, const at::Tensor& grad);

}  // namespace halfstep
