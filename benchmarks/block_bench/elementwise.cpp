// SwiGLU and rotary positions of BF16 tensors, at the shapes of SmolLM2-135M over four texts of 512 tokens,
// and GELU by tanh at those of GPT-2 small over as many.
#include <halfstep/functions.h>

#include "block_bench/block_bench.h"

namespace bench {
namespace {

constexpr int64_t kBatch = 4, kLength = 512, kHeadSize = 64, kInner = 1536;

at::Tensor low_leaf(at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); }

Block swiglu_block() {
  const auto product = [] { return low_leaf({kBatch, kLength, kInner}).requires_grad_(); };
  const auto chain = [](const Tensors& inputs) { return at::silu(inputs[0]) * inputs[1]; };
  return {.name = "swiglu",
          .shape = "4,512,1536",
          .inputs = {product(), product()},
          .ours = [](const Tensors& inputs) { return halfstep::swiglu(inputs[0], inputs[1]); },
          .libtorch = chain,
          .exact = chain};
}

Block gelu_block() {
  const auto by_tanh = [](const Tensors& inputs) { return at::gelu(inputs[0], "tanh"); };
  return {.name = "gelu",
          .shape = "4,512,3072",
          .inputs = {low_leaf({kBatch, kLength, 3072}).requires_grad_()},
          .ours = by_tanh,
          .libtorch = by_tanh,
          .exact = by_tanh};
}

Block rotary_block(int64_t heads) {
  const at::Tensor speeds = at::pow(10000.0, -at::arange(0, kHeadSize, 2, at::kFloat) / kHeadSize);
  const at::Tensor half = at::arange(kLength, at::kFloat).unsqueeze(1) * speeds;
  const at::Tensor angles = at::cat({half, half}, -1);
  const auto chain = [](const Tensors& inputs) {
    const auto halves = inputs[0].chunk(2, -1);
    return (inputs[0] * inputs[1] + at::cat({-halves[1], halves[0]}, -1) * inputs[2])
        .to(inputs[0].scalar_type());
  };
  // As a layer has them: the heads of a position side by side.
  return {.name = "rotary",
          .shape = "4," + std::to_string(heads) + ",512,64",
          .inputs = {low_leaf({kBatch, kLength, heads, kHeadSize}).transpose(1, 2).requires_grad_(),
                     angles.cos(), angles.sin()},
          .ours = [](const Tensors& inputs) { return halfstep::rotary(inputs[0], inputs[1], inputs[2]); },
          .libtorch = chain,
          .exact = chain};
}

}  // namespace

std::vector<Block> elementwise_blocks() {
  return {rotary_block(9), rotary_block(3), swiglu_block(), gelu_block()};
}

}  // namespace bench
