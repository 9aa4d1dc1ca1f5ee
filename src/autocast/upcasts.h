// Low-precision tensors that the policy cast up for one operation, and what backward keeps of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "tensor/saved_tensors.h"

namespace halfstep {

/// One BF16 or FP16 argument and the FP32 copy that the operation gets in its place.
struct Upcast {
  at::Tensor original;
  at::Tensor copy;
};

/// Whether backward may keep the original in place of the copy.
bool original_may_stand_for(const Upcast& upcast);

/// While it lives, backward keeps the originals where it would keep the copies, and casts them again: the
/// same bits in half the bytes, and often in none, because a neighbour keeps the original anyway.
///
/// The copy itself is kept where the original is a parameter, because an optimizer may change it before
/// backward unseen, and where the original is a small part of a storage that would be held with it.
class RepeatedUpcasts {
 public:
  /// Does nothing when there is nothing to do: no up-casts, gradients off, or an engine that cannot be asked.
  explicit RepeatedUpcasts(std::vector<Upcast> upcasts);

 private:
  std::optional<SavedTensorScope> scope_;
};

}  // namespace halfstep
