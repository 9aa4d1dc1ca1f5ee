// Llama. Members that are registered carry the names that its files use.
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <halfstep/activations.h>
#include <halfstep/models.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/configs.h"
#include "models/layers.h"
#include "models/rope.h"

namespace halfstep {
namespace {

using models::Linear, models::RmsNorm, models::Rotation;

struct Attention : torch::nn::Module {
  Attention(const LlamaConfig& config, Unfilled unfilled)
      : heads(config.num_attention_heads),
        key_value_heads(models::key_value_heads_of(config)),
        head_size(models::head_size_of(config)),
        dropout(config.attention_dropout) {
    const int64_t width = config.hidden_size;
    const auto linear = [&](const char* name, int64_t inputs, int64_t outputs) {
      return register_module(name,
                             std::make_shared<Linear>(inputs, outputs, config.attention_bias, unfilled));
    };
    q_proj = linear("q_proj", width, heads * head_size);
    k_proj = linear("k_proj", width, key_value_heads * head_size);
    v_proj = linear("v_proj", width, key_value_heads * head_size);
    o_proj = linear("o_proj", heads * head_size, width);
  }

  at::Tensor forward(const at::Tensor& x, const Rotation& rotation) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto by_head = [&](const at::Tensor& rows, int64_t head_count) {
      return rows.view({batch, length, head_count, head_size}).transpose(1, 2);
    };
    const at::Tensor query = models::rotate(by_head((*q_proj)(x), heads), rotation);
    const at::Tensor key = models::rotate(by_head((*k_proj)(x), key_value_heads), rotation);
    const at::Tensor value = by_head((*v_proj)(x), key_value_heads);
    // With enable_gqa LibTorch shares each head of keys and values between several queries' by itself, which
    // on the CPU is quicker than copies of them (docs/models.md).
    const at::Tensor attended = at::scaled_dot_product_attention(
        query, key, value, /*attn_mask=*/{}, is_training() ? dropout : 0, /*is_causal=*/true,
        /*scale=*/std::nullopt, /*enable_gqa=*/heads != key_value_heads);
    return (*o_proj)(attended.transpose(1, 2).reshape({batch, length, heads * head_size}));
  }

  int64_t heads, key_value_heads, head_size;
  double dropout;
  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;
};

/// SwiGLU: one product decides how much of the other passes.
struct FeedForward : torch::nn::Module {
  FeedForward(const LlamaConfig& config, Unfilled unfilled)
      : activation(models::activation_named(config.hidden_act, "hidden_act")) {
    const auto linear = [&](const char* name, int64_t inputs, int64_t outputs) {
      return register_module(name, std::make_shared<Linear>(inputs, outputs, config.mlp_bias, unfilled));
    };
    gate_proj = linear("gate_proj", config.hidden_size, config.intermediate_size);
    up_proj = linear("up_proj", config.hidden_size, config.intermediate_size);
    down_proj = linear("down_proj", config.intermediate_size, config.hidden_size);
  }

  at::Tensor forward(const at::Tensor& x) {
    return (*down_proj)(activation((*gate_proj)(x)) * (*up_proj)(x));
  }

  models::Activation activation;
  std::shared_ptr<Linear> gate_proj, up_proj, down_proj;
};

struct Block : torch::nn::Module {
  Block(const LlamaConfig& config, Unfilled unfilled) {
    const auto norm = [&] {
      return std::make_shared<RmsNorm>(config.hidden_size, config.rms_norm_eps, unfilled);
    };
    self_attn = register_module("self_attn", std::make_shared<Attention>(config, unfilled));
    mlp = register_module("mlp", std::make_shared<FeedForward>(config, unfilled));
    input_layernorm = register_module("input_layernorm", norm());
    post_attention_layernorm = register_module("post_attention_layernorm", norm());
  }

  at::Tensor forward(at::Tensor x, const Rotation& rotation) {
    x = x + self_attn->forward((*input_layernorm)(x), rotation);
    return x + mlp->forward((*post_attention_layernorm)(x));
  }

  std::shared_ptr<Attention> self_attn;
  std::shared_ptr<FeedForward> mlp;
  std::shared_ptr<RmsNorm> input_layernorm, post_attention_layernorm;
};

}  // namespace

struct Llama::Model : torch::nn::Module {
  Model(const LlamaConfig& config, Unfilled unfilled)
      : rope(config.rope), head_size(models::head_size_of(config)) {
    const int64_t width = config.hidden_size;
    embed_tokens = register_module("embed_tokens",
                                   std::make_shared<models::Embedding>(config.vocab_size, width, unfilled,
                                                                       models::padding_row_of(config)));
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
      layers->push_back(std::make_shared<Block>(config, unfilled));
    register_module("layers", layers);
    norm = register_module("norm", std::make_shared<RmsNorm>(width, config.rms_norm_eps, unfilled));
  }

  at::Tensor forward(const at::Tensor& ids, bool recompute_blocks) {
    const Rotation rotation = models::rotation_of(rope, head_size, ids.size(1), ids.device());
    at::Tensor x = (*embed_tokens)(ids);
    for (size_t i = 0; i < layers->size(); ++i) {
      const auto block = [block = layers->ptr<Block>(i), rotation](const at::Tensor& in) {
        return block->forward(in, rotation);
      };
      x = recompute_blocks ? checkpoint_activations(block, x) : block(x);
    }
    return (*norm)(x);
  }

  RopeParameters rope;
  int64_t head_size;
  std::shared_ptr<models::Embedding> embed_tokens;
  torch::nn::ModuleList layers;
  std::shared_ptr<RmsNorm> norm;
};

Llama::Llama(LlamaConfig config, Unfilled unfilled) : config_(std::move(config)) {
  models::check_config(config_);
  model_ = register_module("model", std::make_shared<Model>(config_, unfilled));
  if (config_.tie_word_embeddings) return;
  const auto head =
      std::make_shared<Linear>(config_.hidden_size, config_.vocab_size, /*with_bias=*/false, unfilled);
  free_head_ = register_module("lm_head", head)->weight;
}

Llama::Llama(LlamaConfig config, uint64_t seed) : Llama(std::move(config), Unfilled{}) {
  models::draw_initial_values(*this, seed, config_.initializer_range, config_.initializer_range);
  const at::NoGradGuard no_grad;
  if (config_.pad_token_id) model_->embed_tokens->weight[models::padding_row_of(config_)].zero_();
}

at::Tensor Llama::forward(const at::Tensor& ids) {
  models::check_ids(ids);
  const at::Tensor& head = free_head_.defined() ? free_head_ : model_->embed_tokens->weight;
  return at::linear(model_->forward(ids, recompute_blocks), head);
}

}  // namespace halfstep
