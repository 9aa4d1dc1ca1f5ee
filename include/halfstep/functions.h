// Parts of models that LibTorch computes in several passes over memory, as one operation each.
//
//   x = halfstep::swiglu(gate_proj(x), up_proj(x));              // silu(gate) * up
//   query = halfstep::rotary(query, cos, sin);                   // [batch, heads, length, head size]
//   y = halfstep::rms_norm(x, gain, 1e-5);                       // in the type of x
//
// Inside an AutocastScope, BF16 and FP16 tensors on the CPU take one pass forward and one backward, computed
// in FP32 and rounded once; backward keeps no more than the inputs, and the bits are the same with any number
// of threads. Everywhere else (outside scopes, FP32 tensors, other devices) they are LibTorch's own
// operations, with their bits and their memory. Each is a row of the policy, "halfstep::swiglu" for instance:
// OpPolicy::set with OpRule::Stock asks for LibTorch's operations inside a scope too.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>

namespace halfstep {

/// silu(gate) * up, of two tensors of one size: the gated unit of Llama's feed-forward part. In one pass
/// where both are contiguous.
[[nodiscard]] HALFSTEP_API at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Rotary positions as Hugging Face has them: with n = head size / 2, element i of a head becomes
/// x[i] cos[i] - x[n + i] sin[i], and element n + i becomes x[n + i] cos[n + i] + x[i] sin[n + i].
///
/// `x` is [batch, heads, length, head size], in any order in memory; `cos` and `sin` are broadcast to it, and
/// FP32 whatever the type of `x`, because far positions need its digits. In one pass where they are
/// [length, head size] or [batch, 1, length, head size], contiguous, and get no gradient.
[[nodiscard]] HALFSTEP_API at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos,
                                             const at::Tensor& sin);

/// Each row of the last dimension over its root mean square, times a gain of each column:
/// x / sqrt(mean(x^2) + eps) * gain, in the type of x. Inside a scope that of at::rms_norm would be FP32: for
/// a norm whose output goes into products, which round it anyway. In one pass where the rows are contiguous.
[[nodiscard]] HALFSTEP_API at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps);

/// Each row of the last dimension less its mean, over its deviation, times a gain and plus a bias of each
/// column. In the type of x, as rms_norm is.
[[nodiscard]] HALFSTEP_API at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& gain,
                                                 const at::Tensor& bias, double eps);

}  // namespace halfstep
