// BF16 and FP16 tensors as the kernels take them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/dispatch.h"

namespace halfstep {

inline Format low_format(const at::Tensor& low) {
  return low.scalar_type() == at::kBFloat16 ? Format::BF16 : Format::FP16;
}

/// The elements from `first` on.
inline const void* low_elements(const at::Tensor& low, int64_t first) {
  return static_cast<const uint16_t*>(low.const_data_ptr()) + first;
}
inline void* low_elements(void* low, int64_t first) { return static_cast<uint16_t*>(low) + first; }

}  // namespace halfstep
