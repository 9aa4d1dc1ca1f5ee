// What a step's backward begins with. MixedPrecision::backward and whoever takes a step again have it from
// here.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <halfstep/mixed_precision.h>

namespace halfstep::train {

/// The loss times its scale, a number or a tensor on the loss's device, and the share of the mean over ranks
/// that is this rank's: gradients are added up over ranks, as over micro-batches. In FP32: 2^16 times a loss
/// of 2 is Inf in FP16.
template <typename Scale>
at::Tensor backward_root(const at::Tensor& loss, const Scale* loss_scale, int ranks,
                         const RankReduction& reduction) {
  at::Tensor root = loss;
  if (loss_scale) root = root.to(at::kFloat) * *loss_scale;
  // Of a canonical sum the loss is divided by the number of all ranks' micro-batches already.
  if (ranks > 1 && reduction.canonical_batches == 0) root = root.to(at::kFloat) / ranks;
  return root;
}

}  // namespace halfstep::train
