#include "support/gpt.h"

#include <halfstep/activations.h>

#include <cmath>

namespace bench {
namespace {

namespace nn = torch::nn;

/// GPT-2's: normal weights, zero biases. `standard_deviation` is smaller where a layer adds to the residual.
nn::Linear linear(std::int64_t inputs, std::int64_t outputs, double standard_deviation = 0.02) {
  nn::Linear made(inputs, outputs);
  nn::init::normal_(made->weight, 0, standard_deviation);
  nn::init::zeros_(made->bias);
  return made;
}

nn::Embedding embedding(std::int64_t entries, std::int64_t width) {
  nn::Embedding made(entries, width);
  nn::init::normal_(made->weight, 0, 0.02);
  return made;
}

nn::LayerNorm layer_norm(std::int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

}  // namespace

GptBlock::GptBlock(const GptShape& shape) : heads(shape.heads) {
  const std::int64_t width = shape.width;
  // Two additions a layer: their sum keeps the variance of one.
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(shape.layers));
  norm1 = register_module("norm1", layer_norm(width));
  qkv = register_module("qkv", linear(width, 3 * width));
  out = register_module("out", linear(width, width, residual));
  norm2 = register_module("norm2", layer_norm(width));
  up = register_module("up", linear(width, 4 * width));
  down = register_module("down", linear(4 * width, width, residual));
}

torch::Tensor GptBlock::forward(torch::Tensor x) {
  const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto parts = qkv(norm1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
  const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                                         /*dropout_p=*/0, /*is_causal=*/true);
  x = x + out(attended.transpose(1, 2).reshape({batch, length, width}));
  return x + down(at::gelu(up(norm2(x))));
}

Gpt::Gpt(const GptShape& shape, BlockActivations activations) : activations_(activations) {
  tokens_ = register_module("tokens", embedding(shape.vocabulary, shape.width));
  positions_ = register_module("positions", embedding(shape.context, shape.width));
  for (std::int64_t i = 0; i < shape.layers; ++i) blocks_->push_back(GptBlock(shape));
  register_module("blocks", blocks_);
  norm_ = register_module("norm", layer_norm(shape.width));
}

torch::Tensor Gpt::logits(const torch::Tensor& tokens) {
  torch::Tensor x = tokens_(tokens) + positions_->weight.narrow(0, 0, tokens.size(1));
  for (std::size_t i = 0; i < blocks_->size(); ++i) {
    const auto forward = [block = blocks_->ptr<GptBlock>(i)](const torch::Tensor& in) {
      return block->forward(in);
    };
    x = activations_ == BlockActivations::Kept ? forward(x) : halfstep::checkpoint_activations(forward, x);
  }
  return at::linear(norm_(x), tokens_->weight);
}

torch::Tensor Gpt::loss(const torch::Tensor& tokens, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits(tokens).flatten(0, 1), targets.flatten());
}

std::int64_t parameter_count(const torch::nn::Module& model) {
  std::int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  return count;
}

}  // namespace bench
