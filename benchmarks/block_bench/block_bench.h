// Blocks of a network that Halfstep computes itself, beside LibTorch's operations for the same.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace bench {

using Tensors = std::vector<at::Tensor>;

/// What is timed: one direction of one block at one shape.
struct BlockCase {
  std::string key;  // "attention backward 4,9/3,512,64": the operation, the direction, the shape
  std::function<Tensors()> ours, libtorch;
  std::function<Tensors()> exact;  // the same results in FP64; run once
  double operations = 0;           // multiplications and additions of its products; 0 where there are none
};

/// A block as a function of its inputs, forward and backward. `ours` is called inside a BF16 AutocastScope,
/// `libtorch` outside of any, both with `inputs` as they are; `exact` with FP64 copies. Backward is that of
/// all inputs that require a gradient, from the same random gradient of the output.
struct Block {
  std::string name, shape;
  Tensors inputs;
  std::function<at::Tensor(const Tensors& inputs)> ours, libtorch, exact;
  double forward_operations = 0, backward_operations = 0;  // as BlockCase has them
};

/// Two cases, "<name> forward <shape>" and "<name> backward <shape>".
std::vector<BlockCase> cases_of(const Block& block);

// Each in a file of its own; main.cpp lists them.
std::vector<Block> attention_blocks();
std::vector<Block> convolution_blocks();
std::vector<Block> elementwise_blocks();

}  // namespace bench
