// Less memory for what forward keeps for backward: compute it again, or keep it in fewer bits.
//
// Both need LibTorch's own autograd engine: in a process that runs Python's they are an Error.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/formats.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace halfstep {

class SavedTensorScope;

namespace detail {

/// From its construction to the end of the block, what autograd saves on this thread is not kept: `run_again`
/// makes it anew from the inputs.
class HALFSTEP_API CheckpointedCall {
 public:
  using RunAgain = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointedCall(const std::vector<at::Tensor>& inputs, RunAgain run_again);
  ~CheckpointedCall();
  CheckpointedCall(const CheckpointedCall&) = delete;
  CheckpointedCall& operator=(const CheckpointedCall&) = delete;

 private:
  class FirstRun;
  std::unique_ptr<FirstRun> first_run_;  // empty where gradients are off
};

}  // namespace detail

/// Calls function(inputs...) and keeps only the inputs for backward, which runs the function again.
///
///   x = halfstep::checkpoint_activations([block](const at::Tensor& x) { return block->forward(x); }, x);
///
/// Gradients have the bits of a plain call. For that the second run sees what the first saw: the autocast
/// type and policy, and the random numbers. On the CPU these come from a private copy of the default
/// generator, so other threads may draw meanwhile; the generators of the inputs' other devices are restored
/// afterwards. Whatever the function returns is returned; torch::autograd::grad, retain_graph, second
/// derivatives, inputs without a gradient, parameters that the function holds, scopes that it opens and calls
/// inside calls all work.
///
/// What surprises people:
/// - The function is copied and called again after this call has returned. Capture modules and tensors by
///   value; a reference to a local variable dangles.
/// - It must do the same each time; a run that saves other tensors than the first is an Error. What it
///   changes besides, such as running statistics, is changed twice.
/// - Inputs and parameters that were changed in place before backward are an error. Not noticed: a change
///   through data(), a tensor without a gradient that no operation saves, and a captured activation that was
///   changed through detach().
/// - Random numbers that are drawn without an operator of LibTorch are not repeated, and seeding the default
///   generator inside the function does not affect the function. A generator that is passed to an operator is
///   repeated; let no other thread draw from it meanwhile.
/// - Calling backward inside the function is an Error.
template <typename Function, typename... Inputs>
auto checkpoint_activations(Function function, const Inputs&... inputs) {
  static_assert((std::is_convertible_v<const Inputs&, at::Tensor> && ...), "the inputs are tensors");
  const auto shared = std::make_shared<Function>(std::move(function));
  const auto run_again = [shared]<std::size_t... Index>(std::index_sequence<Index...>) {
    return [shared](const std::vector<at::Tensor>& again) { (void)(*shared)(again[Index]...); };
  }(std::index_sequence_for<Inputs...>());
  const detail::CheckpointedCall call({inputs...}, run_again);
  return (*shared)(inputs...);
}

/// A scope in which activations that autograd saves are kept in fewer bits, and restored at backward.
///
/// Kept so are floating-point tensors of at least 512 elements that depend on something with a gradient: FP32
/// ones in BF16; FP32, BF16 and FP16 ones in E4M3 or E5M2. Parameters and casts of them, statistics,
/// masks and indices stay as they are, and so do logits and log-probabilities of a loss. Forward is not
/// changed; gradients are.
///
/// Error. A value is restored to within half a unit of its last kept place: 2^-8 of itself in BF16. In FP8
/// each 128 values that follow each other in memory share a power of two that brings the largest to the top
/// of the format; a value is then restored to within 2^-4 of itself in E4M3 and 2^-3 in E5M2, but values
/// below 2^-13 (E4M3) or 2^-28 (E5M2) of the largest of the 128 may be off by 2^-17 or 2^-31 of that largest.
/// On a GPT block gradients were off by 0.14 % (BF16), 2.3 % (E4M3) and 4.6 % (E5M2) in the norm;
/// tests/nn/compressed_activations_test.cpp measures it and holds it below 0.7 %, 11 % and 22 %.
///
/// Where backward takes exp of what is restored, the error grows with it: attention's q and k, and the input
/// of logsumexp. With logits of deviation 9 the gradient of q was off by 3 % (BF16), 41 % (E4M3) and 89 %
/// (E5M2): leave such layers outside the scope, or use BF16. A norm divides by its input's deviation, which
/// is not compressed: where that is smaller than the error of the input, the gradient is noise, and in FP16
/// may overflow, so that the step is skipped. Leave norms of inputs that hardly vary outside as well.
///
/// What is not finite stays not finite; E4M3 has no Inf and keeps NaN instead, and the finite ones among its
/// 128 end at the format's max.
class HALFSTEP_API CompressedActivations {
 public:
  /// BF16, E4M3 or E5M2; anything else is an Error.
  [[nodiscard]] explicit CompressedActivations(Format format);
  ~CompressedActivations();
  CompressedActivations(const CompressedActivations&) = delete;
  CompressedActivations& operator=(const CompressedActivations&) = delete;

 private:
  std::unique_ptr<SavedTensorScope> scope_;
};

}  // namespace halfstep
