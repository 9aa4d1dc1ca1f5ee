// Cross-entropy of BF16 or FP16 logits, computed in FP32 without an FP32 copy of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace halfstep {

/// The arguments of aten::cross_entropy_loss.
struct CrossEntropyArguments {
  at::Tensor logits;
  at::Tensor target;
  std::optional<at::Tensor> weight;
  int64_t reduction;  // at::Reduction
  int64_t ignore_index;
  double label_smoothing;
};

/// Rows of BF16 or FP16 logits on CPU or CUDA, one class index a row; class weights or label smoothing, not
/// both.
bool takes_low_logits(const CrossEntropyArguments& arguments);

/// The FP32 loss, as stock computes it from FP32 copies: a few rows at a time, so that what is FP32 stays
/// small.
///
/// Backward keeps the logits as they are and two FP32 numbers a row, and rounds each gradient once. Where the
/// graph is not kept and nobody else holds the logits, the gradient takes their memory.
at::Tensor low_logits_cross_entropy(const CrossEntropyArguments& arguments);

}  // namespace halfstep
