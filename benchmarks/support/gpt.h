// GPT-2 as anyone would write it with LibTorch: what the benchmarks train. No line in it speaks of precision.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace bench {

struct GptShape {
  std::int64_t vocabulary;
  std::int64_t width;
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t context;
};

inline constexpr GptShape kGpt2{
    .vocabulary = 50257, .width = 768, .layers = 12, .heads = 12, .context = 1024};
inline constexpr GptShape kGpt30M{.vocabulary = 50257, .width = 384, .layers = 6, .heads = 6, .context = 256};
inline constexpr GptShape kByteGpt{.vocabulary = 256, .width = 96, .layers = 4, .heads = 4, .context = 64};

/// Pre-norm block: attention, then a feed-forward part, each added to what came in.
struct GptBlock : torch::nn::Module {
  explicit GptBlock(const GptShape& shape);
  torch::Tensor forward(torch::Tensor x);

  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};

/// Where backward finds what a block computed.
enum class BlockActivations { Kept, ComputedAgain };

/// Learned positions, head tied to the token embedding; 124,439,808 parameters in 148 tensors with kGpt2.
/// Initialised as GPT-2 is, from LibTorch's default generator.
class Gpt : public torch::nn::Module {
 public:
  explicit Gpt(const GptShape& shape, BlockActivations activations = BlockActivations::Kept);

  /// Mean cross-entropy; `tokens` and `targets` are int64, [batch, length].
  torch::Tensor loss(const torch::Tensor& tokens, const torch::Tensor& targets);

 private:
  torch::Tensor logits(const torch::Tensor& tokens);

  BlockActivations activations_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
};

std::int64_t parameter_count(const torch::nn::Module& model);

}  // namespace bench
