// The tail of a training step, after backward: un-scale, look for what is not finite, clip, update, and write
// the low-precision copy. Three ways, with the same effect on FP32 weights.
#pragma once

#include <halfstep/optim.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace bench {

using Tensors = std::vector<at::Tensor>;

/// What all tails do. The gradients that they get are loss_scale times too large.
struct TailSettings {
  double loss_scale = 1024;
  halfstep::AdamWOptions adamw{.lr = 1e-3, .weight_decay = 0.1};
};

/// Halfstep: one pass that reads the gradients, one that updates. Gradients are not rewritten.
class HalfstepTail {
 public:
  HalfstepTail(const Tensors& weights, halfstep::WeightStorage storage, const TailSettings& settings);

  void use_grads(const Tensors& grads);  ///< FP32 or BF16; not copied
  void step(double max_norm);
  double norm() const;  ///< of the gradients, un-scaled
  Tensors full_precision() const;
  const std::vector<halfstep::Param>& params() const { return params_; }

 private:
  TailSettings settings_;
  std::vector<halfstep::Param> params_;
  halfstep::AdamW optimizer_;
};

/// What LibTorch 2.13 has for it, called from C++ as torch.amp, clip_grad_norm_ and AdamW(fused=True) call it
/// from Python: BF16 gradients are copied to FP32 first (its fused AdamW wants one type); then un-scale with
/// a finite check, norms, clip, _fused_adamw_ on FP32 masters, copy to the BF16 working weights. Rewrites its
/// gradients.
class EngineTail {
 public:
  EngineTail(const Tensors& weights, const TailSettings& settings);

  void load_fp32_grads(const Tensors& grads);  ///< copied: not part of the tail
  void step_from_fp32(double max_norm);
  void step_from_bf16(const Tensors& grads, double max_norm);
  double last_norm() const { return last_norm_.item<double>(); }  ///< of the gradients, un-scaled
  const Tensors& full_precision() const { return masters_; }
  const Tensors& working() const { return working_; }

 private:
  TailSettings settings_;
  Tensors masters_, working_, grads_, first_moments_, second_moments_, step_counts_;
  at::Tensor last_norm_;
};

/// What a LibTorch user has today for FP32 training: gradients multiplied and checked one by one, LibTorch's
/// clip_grad_norm_ and torch::optim::AdamW. No low-precision copy. Rewrites its gradients.
class TorchOptimTail {
 public:
  TorchOptimTail(const Tensors& weights, const TailSettings& settings);

  void load_grads(const Tensors& grads);  ///< copied: not part of the tail
  void step(double max_norm);
  void step_of_optimizer_alone();
  const Tensors& full_precision() const { return weights_; }

 private:
  TailSettings settings_;
  Tensors weights_;
  torch::optim::AdamW optimizer_;
};

}  // namespace bench
