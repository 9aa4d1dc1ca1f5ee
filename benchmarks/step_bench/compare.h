// Halfstep's tail beside LibTorch's on one set of weights: first whether they agree, then how long they take.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

/// FP32 weights to step, and the number of tail steps in one sample.
struct Workload {
  std::vector<at::Tensor> weights = {};
  int steps_per_sample = 1;
};

Workload gpt2_weights(at::Device device);   ///< 124,439,808 in 148 tensors
Workload small_weights(at::Device device);  ///< 1,006,080 in 60 tensors

/// Median and its standard error over rounds.
struct Figure {
  double median = 0;
  double error = 0;
};

struct Comparison {
  std::int64_t parameters = 0;
  std::int64_t tensors = 0;
  int rounds = 0;
  double worst_of_allowed = 0;  ///< largest difference of two tails' weights, over what rounding may explain
  double halfstep_norm_error = 0;  ///< of the gradients' joint norm, relative, against FP64
  double engine_norm_error = 0;

  // One tail step in milliseconds, in the order of kTailNames.
  std::vector<Figure> milliseconds = {};
  // By how much Halfstep's split master is faster, round by round; its FP32 master beside it.
  Figure vs_engine_fp32_grads = {}, vs_engine_bf16_grads = {};
  Figure fp32_master_vs_engine_fp32_grads = {}, fp32_master_vs_engine_bf16_grads = {};
  Figure vs_torch_optim = {};             ///< FP32 gradients on both sides
  Figure vs_torch_optim_bf16_grads = {};  ///< as each trains by default: BF16 gradients here, FP32 there
  Figure vs_torch_optim_step_alone = {};  ///< without un-scale and clip over there
  // Bytes that the split master's tail moves a second, over those that `values[i] += c` moves.
  Figure bandwidth_share_fp32_grads = {}, bandwidth_share_bf16_grads = {};
  double read_modify_write_gb_per_second = 0;
};

extern const std::vector<std::string> kTailNames;

/// Throws an Error, before anything is timed, when the tails' weights differ by more than rounding explains.
/// On the device that the weights are on; a sample ends when the device has computed it.
Comparison compare(const Workload& workload, int rounds);

}  // namespace bench
