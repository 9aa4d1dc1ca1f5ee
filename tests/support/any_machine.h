// Tests study numerics, so they run where BF16 is only imitated too.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/autocast.h>

namespace halfstep::testing {

inline constexpr AutocastOptions kAnyMachine{.allow_emulated = true};

/// Convolutions and recurrent layers low on every machine: without instructions for the type they would stay
/// in FP32. Products are as with kAnyMachine.
inline AutocastOptions low_on_any_machine(at::ScalarType low) {
  const bool has_products =
      low == at::kBFloat16 ? __builtin_cpu_supports("avx512bf16") : __builtin_cpu_supports("avx512fp16");
  return {.allow_emulated = true, .products_in_fp32 = !has_products};
}

}  // namespace halfstep::testing
