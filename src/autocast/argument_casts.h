// Casts among the arguments of one operation, as they lie on the dispatcher's stack, and what backward keeps
// of those that went up.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <vector>

#include "tensor/saved_tensors.h"

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

/// One BF16 or FP16 argument and the FP32 copy that the operation gets in its place.
struct Upcast {
  at::Tensor original;
  at::Tensor copy;
};

/// Casts every floating-point tensor of the device to `to`, except FP64 ones. Returns those casts that went
/// up from BF16 or FP16.
std::vector<Upcast> cast_arguments_(Arguments arguments, at::DeviceType device, at::ScalarType to);

/// Whether backward may keep the original in place of the copy.
bool original_may_stand_for(const Upcast& upcast);

/// While it lives, backward keeps the originals where it would keep the copies, and casts them again: the
/// same bits in half the bytes, and often in none, because a neighbour keeps the original anyway.
///
/// The copy itself is kept where the original is a small part of a storage that would be held with it, and
/// where it is a parameter, because an optimizer may change it before backward unseen. Neither counts where
/// the operation would keep the originals if it were given them: `of_low_operation`.
class RepeatedUpcasts {
 public:
  /// Does nothing when there is nothing to do: no up-casts, gradients off, or an engine that cannot be asked.
  explicit RepeatedUpcasts(std::vector<Upcast> upcasts, bool of_low_operation = false);

 private:
  std::optional<SavedTensorScope> scope_;
};

}  // namespace halfstep
