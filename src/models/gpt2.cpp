// GPT-2. Members that are registered carry the names that its files use.
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>

#include "models/configs.h"
#include "models/layers.h"

namespace halfstep {
namespace {

using models::Conv1D, models::Embedding, models::LayerNorm;

struct Attention : torch::nn::Module {
  Attention(const Gpt2Config& config, int64_t layer, Unfilled unfilled)
      : heads(config.n_head),
        attention_dropout(config.attn_pdrop),
        residual_dropout(config.resid_pdrop),
        c_attn(
            register_module("c_attn", std::make_shared<Conv1D>(config.n_embd, 3 * config.n_embd, unfilled))),
        c_proj(register_module("c_proj", std::make_shared<Conv1D>(config.n_embd, config.n_embd, unfilled))) {
    const auto head_size = static_cast<double>(config.n_embd / config.n_head);
    if (config.scale_attn_weights) logit_factor /= std::sqrt(head_size);
    if (config.scale_attn_by_inverse_layer_idx) logit_factor /= static_cast<double>(layer + 1);
  }

  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = (*c_attn)(x).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const at::Tensor attended = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, is_training() ? attention_dropout : 0,
        /*is_causal=*/true, logit_factor);
    const at::Tensor out = (*c_proj)(attended.transpose(1, 2).reshape({batch, length, width}));
    return at::dropout(out, residual_dropout, is_training());
  }

  int64_t heads;
  double attention_dropout, residual_dropout;
  double logit_factor = 1;
  std::shared_ptr<Conv1D> c_attn, c_proj;
};

struct FeedForward : torch::nn::Module {
  FeedForward(const Gpt2Config& config, Unfilled unfilled)
      : activation(models::activation_named(config.activation_function, "activation_function")),
        residual_dropout(config.resid_pdrop) {
    const int64_t width = config.n_embd, inner = config.n_inner.value_or(4 * width);
    c_fc = register_module("c_fc", std::make_shared<Conv1D>(width, inner, unfilled));
    c_proj = register_module("c_proj", std::make_shared<Conv1D>(inner, width, unfilled));
  }

  at::Tensor forward(const at::Tensor& x) {
    return at::dropout((*c_proj)(activation((*c_fc)(x))), residual_dropout, is_training());
  }

  models::Activation activation;
  double residual_dropout;
  std::shared_ptr<Conv1D> c_fc, c_proj;
};

struct Block : torch::nn::Module {
  Block(const Gpt2Config& config, int64_t layer, Unfilled unfilled) {
    const auto norm = [&] {
      return std::make_shared<LayerNorm>(config.n_embd, config.layer_norm_epsilon, unfilled);
    };
    ln_1 = register_module("ln_1", norm());
    attn = register_module("attn", std::make_shared<Attention>(config, layer, unfilled));
    ln_2 = register_module("ln_2", norm());
    mlp = register_module("mlp", std::make_shared<FeedForward>(config, unfilled));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attn->forward((*ln_1)(x));
    return x + mlp->forward((*ln_2)(x));
  }

  std::shared_ptr<LayerNorm> ln_1, ln_2;
  std::shared_ptr<Attention> attn;
  std::shared_ptr<FeedForward> mlp;
};

}  // namespace

struct Gpt2::Transformer : torch::nn::Module {
  Transformer(const Gpt2Config& config, Unfilled unfilled) : embedding_dropout(config.embd_pdrop) {
    wte = register_module("wte", std::make_shared<Embedding>(config.vocab_size, config.n_embd, unfilled));
    wpe = register_module("wpe", std::make_shared<Embedding>(config.n_positions, config.n_embd, unfilled));
    for (int64_t layer = 0; layer < config.n_layer; ++layer)
      h->push_back(std::make_shared<Block>(config, layer, unfilled));
    register_module("h", h);
    ln_f = register_module("ln_f",
                           std::make_shared<LayerNorm>(config.n_embd, config.layer_norm_epsilon, unfilled));
  }

  at::Tensor forward(const at::Tensor& ids, bool recompute_blocks) {
    const at::Tensor positions = wpe->weight.narrow(0, 0, ids.size(1));
    at::Tensor x = at::dropout((*wte)(ids) + positions, embedding_dropout, is_training());
    for (size_t i = 0; i < h->size(); ++i) {
      const auto block = [block = h->ptr<Block>(i)](const at::Tensor& in) { return block->forward(in); };
      x = recompute_blocks ? checkpoint_activations(block, x) : block(x);
    }
    return (*ln_f)(x);
  }

  double embedding_dropout;
  std::shared_ptr<Embedding> wte, wpe;
  torch::nn::ModuleList h;
  std::shared_ptr<LayerNorm> ln_f;
};

Gpt2::Gpt2(Gpt2Config config, Unfilled unfilled) : config_(std::move(config)) {
  models::check_config(config_);
  transformer_ = register_module("transformer", std::make_shared<Transformer>(config_, unfilled));
  if (config_.tie_word_embeddings) return;
  const auto head =
      std::make_shared<models::Linear>(config_.n_embd, config_.vocab_size, /*with_bias=*/false, unfilled);
  free_head_ = register_module("lm_head", head)->weight;
}

Gpt2::Gpt2(Gpt2Config config, uint64_t seed) : Gpt2(std::move(config), Unfilled{}) {
  const double deviation = config_.initializer_range;
  // Two additions to the residual stream a layer: their sum keeps the variance of one.
  const double of_residual = deviation / std::sqrt(2.0 * static_cast<double>(config_.n_layer));
  models::draw_initial_values(*this, seed, deviation, of_residual);
}

at::Tensor Gpt2::forward(const at::Tensor& ids) {
  models::check_ids(ids);
  HALFSTEP_CHECK(ids.size(1) <= config_.n_positions, "Gpt2: ", ids.size(1), " ids in a row; n_positions is ",
                 config_.n_positions, ".");
  const at::Tensor& head = free_head_.defined() ? free_head_ : transformer_->wte->weight;
  return at::linear(transformer_->forward(ids, recompute_blocks), head);
}

}  // namespace halfstep
