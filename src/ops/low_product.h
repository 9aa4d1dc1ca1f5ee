// A product of BF16 or FP16 matrices for operations of our own, below autograd: by tiles where the processor
// has them, else LibTorch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace halfstep {

at::Tensor product_of(const at::Tensor& left, const at::Tensor& right,
                      const std::optional<at::Tensor>& bias = {});

}  // namespace halfstep
