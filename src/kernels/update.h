// The optimizer step over raw arrays: look at gradients, then update weights and moments in one pass.
//
// Floating-point arithmetic under the MXCSR that a program starts with: nearest even, subnormals kept. A host
// that sets flush-to-zero gets zeros where subnormals would be. NaNs stay NaNs, with whichever payload.
#pragma once

#include <halfstep/storage.h>

#include "kernels/dispatch.h"

namespace halfstep {

/// The sum of squares, accumulated in FP64: NaN or Inf exactly if an element is, since no sum of squares of
/// finite FP32 numbers overflows FP64. `grads` holds FP32, BF16 or FP16. The order of additions is the same
/// in every table.
double sum_of_squares(Format format, const void* grads, std::size_t count,
                      const KernelTable& table = kernels());

/// How the arrays of one tensor are laid out.
struct UpdateLayout {
  Format grad = Format::FP32;     // FP32, BF16 or FP16
  Format working = Format::FP32;  // FP32 with WeightStorage::Fp32, else BF16 or FP16 (Split: BF16)
  WeightStorage weights = WeightStorage::Fp32;
  MomentStorage moments = MomentStorage::Fp32;
};

/// Elements [first_element, first_element + count) of one tensor. No array overlaps another. However a tensor
/// is cut into runs, the bits are the same. With blockwise moments a run begins at a block, that is at a
/// multiple of kMomentBlockElements, and ends at one or at the tensor's end; the scales are those of its
/// blocks. Moments of which every byte is 0 are 0 in every storage.
struct UpdateRun {
  void* working = nullptr;
  void* companion = nullptr;  // FP32 master, 16-bit remainder or Kahan compensation; null where none is kept
  const void* grad = nullptr;
  void* first_moment = nullptr;   // SGD: the momentum buffer; null without momentum
  void* second_moment = nullptr;  // AdamW alone
  float* first_scale = nullptr;   // of blockwise moments
  float* second_scale = nullptr;
  std::size_t count = 0;
  std::uint64_t first_element = 0;
};

/// What became of the updates of a run. An update is what the step asks to add to a weight, weight decay
/// included, as one FP32 number.
struct UpdateCounts {
  std::uint64_t nonzero = 0;          // elements whose update was a number other than 0
  std::uint64_t working_unmoved = 0;  // of these: the working copy has the same bits as before
  std::uint64_t lost = 0;             // of these: so has its companion, and nothing random evens it out

  UpdateCounts& operator+=(const UpdateCounts& other) {
    nonzero += other.nonzero;
    working_unmoved += other.working_unmoved;
    lost += other.lost;
    return *this;
  }
};

/// AdamW as its user sets it.
struct AdamWRates {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
};

/// One AdamW step for a tensor. Everything is in FP32, in the order and with the fused multiply-adds of
/// at::_fused_adamw_ in LibTorch 2.13. Made by adamw_step; the caller then sets the multiplier and the key.
struct AdamWStep {
  float grad_multiplier = 1;  // un-scale and clip as one number; gradients are not written
  float decay = 0;            // learning rate * weight decay
  float kept = 1;             // 1 - decay
  float first_weight = 0;     // 1 - beta1
  float beta2 = 0;
  float second_weight = 0;      // 1 - beta2
  float second_correction = 1;  // sqrt(1 - beta2^step)
  float eps = 0;
  float negative_step_size = 0;  // -learning rate / (1 - beta1^step)
  // For storages that round at random. Weights use this key; moments that of tensor number + 2^31, so tensor
  // numbers stay below 2^31.
  StochasticKey random;
};

/// The constants of step number `step_number`, counted from 1; computed in FP64.
AdamWStep adamw_step(const AdamWRates& rates, std::int64_t step_number);

/// SGD with momentum, as torch::optim::SGD defines it, with the fused multiply-adds of at::add in
/// LibTorch 2.13.
struct SgdStep {
  float grad_multiplier = 1;
  double learning_rate = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;  // the momentum buffer holds nothing yet and becomes the gradient
  StochasticKey random;
};

UpdateCounts adamw_update(const UpdateLayout& layout, const AdamWStep& step, const UpdateRun& run,
                          const KernelTable& table = kernels());
UpdateCounts sgd_update(const UpdateLayout& layout, const SgdStep& step, const UpdateRun& run,
                        const KernelTable& table = kernels());

/// sum += grads, in FP32, or in BF16 with a BF16 compensation (Kahan). `first`: sum = grads instead.
void accumulate(Format grad, const void* grads, float* sum, std::size_t count, bool first,
                const KernelTable& table = kernels());
void accumulate_kahan(Format grad, const void* grads, std::uint16_t* sum_bf16,
                      std::uint16_t* compensation_bf16, std::size_t count, bool first,
                      const KernelTable& table = kernels());

/// FP32 weights into a storage (working copy and companion), and back, as exactly as the storage holds them.
/// Rounded to nearest even in every storage but SplitMaster, which rounds ties away from 0.
///
/// The working copy is the user's, who may write to it between any two calls. A companion counts only where
/// it rounds to the working copy: an edited FP32 master is the working copy's value, an edited Kahan
/// compensation is 0, and an edited split weight keeps its remainder, which lies within half a unit in the
/// last place of any value but 0, an Inf and a NaN; there it is 0. Updates and load_weights agree on this.
void store_weights(const UpdateLayout& layout, const float* weights, void* working, void* companion,
                   std::size_t count, const KernelTable& table = kernels());
void load_weights(const UpdateLayout& layout, const void* working, const void* companion, float* weights,
                  std::size_t count, const KernelTable& table = kernels());

/// Moments out of their storage, for state that is looked at or moved to another storage.
void load_moments(MomentStorage storage, bool second, const void* moments, const float* scales, float* values,
                  std::size_t count, const KernelTable& table = kernels());

}  // namespace halfstep
