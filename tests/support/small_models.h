// Small models with a loss, for comparing one way of training with another.
#pragma once

#include <torch/torch.h>

namespace halfstep::testing {

struct Mlp : torch::nn::Module {
  Mlp(int64_t inputs, int64_t hidden, int64_t classes) {
    body = register_module("body", torch::nn::Sequential(torch::nn::Linear(inputs, hidden), torch::nn::GELU(),
                                                         torch::nn::Linear(hidden, hidden), torch::nn::GELU(),
                                                         torch::nn::Linear(hidden, classes)));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target) {
    return torch::nn::functional::cross_entropy(body->forward(x), target);
  }
  torch::nn::Sequential body{nullptr};
};

struct ConvNet : torch::nn::Module {
  ConvNet() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    conv2 = register_module("conv2", torch::nn::Conv2d(8, 8, 3));
    head = register_module("head", torch::nn::Linear(8, 10));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target) {
    const at::Tensor features = at::relu(conv2(at::relu(norm(conv1(x)))));
    return torch::nn::functional::cross_entropy(head(features.mean({2, 3})), target);
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
};

/// Pre-norm block: attention, then a feed-forward part, each added to what came in.
struct TransformerBlock : torch::nn::Module {
  TransformerBlock(int64_t width, int64_t heads) : head_count(heads) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts =
        qkv(norm1(x)).view({batch, length, 3, head_count, width / head_count}).permute({2, 0, 3, 1, 4});
    const at::Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
    x = x + out(attended.transpose(1, 2).reshape({batch, length, width}));
    return x + down(at::gelu(up(norm2(x))));
  }
  int64_t head_count;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};

struct Transformer : torch::nn::Module {
  Transformer(int64_t vocabulary, int64_t width, int64_t heads, int64_t layers) {
    tokens = register_module("tokens", torch::nn::Embedding(vocabulary, width));
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(TransformerBlock(width, heads));
    register_module("blocks", blocks);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    head = register_module("head", torch::nn::Linear(width, vocabulary));
  }
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& target) {
    at::Tensor x = tokens(ids);
    for (const auto& block : *blocks) x = block->as<TransformerBlock>()->forward(x);
    return torch::nn::functional::cross_entropy(head(norm(x)).flatten(0, 1), target.flatten());
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

}  // namespace halfstep::testing
