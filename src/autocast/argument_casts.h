// Casts among the arguments of one operation, as they lie on the dispatcher's stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <vector>

#include "autocast/upcasts.h"

namespace halfstep {

using Arguments = std::span<c10::IValue>;

/// The floating-point tensors of one device among the arguments, lists included.
struct FloatingArguments {
  struct Unscaled {
    std::size_t argument;
    at::ScalarType type;
  };

  std::optional<at::ScalarType> widest;  // empty when there is no such tensor
  std::optional<Unscaled> unscaled;      // one that is FP8 or FP4, whose scale is not with it
  bool any_fp64 = false;
  bool all_alike = true;
};

FloatingArguments floating_arguments(std::span<const c10::IValue> arguments, at::DeviceType device);

/// Casts every floating-point tensor of the device to `to`, except FP64 ones. Returns those casts that went
/// up from BF16 or FP16.
std::vector<Upcast> cast_arguments_(Arguments arguments, at::DeviceType device, at::ScalarType to);

/// Strided, of no subclass and without a forward-mode gradient: an operation of ours may take the place of
/// LibTorch's.
bool is_plain(const at::Tensor& tensor);

}  // namespace halfstep
