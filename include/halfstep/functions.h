// Parts of models that LibTorch computes in several passes over memory, as one operation each.
//
//   x = halfstep::swiglu(gate_proj(x), up_proj(x));              // silu(gate) * up
//   query = halfstep::rotary(query, cos, sin);                   // [batch, heads, length, head size]
//
// Inside an AutocastScope, BF16 and FP16 tensors on the CPU take one pass forward and one backward, computed
// in FP32 and rounded once; backward keeps no more than the inputs, and the bits are the same with any number
// of threads. Everywhere else (outside scopes, FP32 tensors, other devices) they are LibTorch's own
// operations, with their bits and their memory. Each is a row of the policy, "halfstep::swiglu" and
// "halfstep::rotary": OpPolicy::set with OpRule::Stock asks for LibTorch's operations inside a scope too.
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

}  // namespace halfstep
