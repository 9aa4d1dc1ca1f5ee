// GPT-2. Members that are registered carry the names that its files use.
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>
#include <tuple>

#include "models/family.h"
#include "models/layers.h"

namespace halfstep {
namespace {

using models::Conv1D, models::Embedding, models::LayerNorm, models::kLargestSize, models::kMostLayers;

Gpt2Config read_config(const files::JsonPlace& file) {
  files::JsonFields fields(file, kLargestSize);
  // transformers takes these too, as other names of n_embd and its kin. No published file has them, and one
  // that was overlooked would leave a default in its place.
  for (const char* alias :
       {"hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"})
    fields.refuse(alias, "GPT-2's own names are n_embd, n_head, n_layer and n_positions.");
  fields.refuse("add_cross_attention", "cross-attention is not implemented.");
  fields.refuse("quantization_config", "quantised weights are not implemented.");
  Gpt2Config config;
  fields.read("vocab_size", config.vocab_size);
  fields.read("n_positions", config.n_positions);
  fields.read("n_embd", config.n_embd);
  fields.read("n_layer", config.n_layer);
  fields.read("n_head", config.n_head);
  fields.read("n_inner", config.n_inner);
  fields.read("activation_function", config.activation_function);
  fields.read("resid_pdrop", config.resid_pdrop);
  fields.read("embd_pdrop", config.embd_pdrop);
  fields.read("attn_pdrop", config.attn_pdrop);
  fields.read("layer_norm_epsilon", config.layer_norm_epsilon);
  fields.read("initializer_range", config.initializer_range);
  fields.read("scale_attn_weights", config.scale_attn_weights);
  fields.read("scale_attn_by_inverse_layer_idx", config.scale_attn_by_inverse_layer_idx);
  fields.read("tie_word_embeddings", config.tie_word_embeddings);
  config.rest = fields.rest().dump();
  return config;
}

nlohmann::json json_of(const Gpt2Config& config) {
  auto file = nlohmann::json::parse(config.rest);
  file["architectures"] = {"GPT2LMHeadModel"};
  file["model_type"] = "gpt2";
  file["vocab_size"] = config.vocab_size;
  file["n_positions"] = config.n_positions;
  file["n_embd"] = config.n_embd;
  file["n_layer"] = config.n_layer;
  file["n_head"] = config.n_head;
  file["n_inner"] = config.n_inner ? nlohmann::json(*config.n_inner) : nlohmann::json();
  file["activation_function"] = config.activation_function;
  file["resid_pdrop"] = config.resid_pdrop;
  file["embd_pdrop"] = config.embd_pdrop;
  file["attn_pdrop"] = config.attn_pdrop;
  file["layer_norm_epsilon"] = config.layer_norm_epsilon;
  file["initializer_range"] = config.initializer_range;
  file["scale_attn_weights"] = config.scale_attn_weights;
  file["scale_attn_by_inverse_layer_idx"] = config.scale_attn_by_inverse_layer_idx;
  file["tie_word_embeddings"] = config.tie_word_embeddings;
  return file;
}

/// That the numbers fit one another and nothing overflows.
void check_config(const Gpt2Config& config) {
  for (const int64_t size : {config.vocab_size, config.n_positions, config.n_embd, config.n_head,
                             config.n_inner.value_or(config.n_embd)})
    HALFSTEP_CHECK(size >= 1 && size <= kLargestSize, "GPT-2 config: a size is ", size, ", expected 1 to ",
                   kLargestSize, ".");
  HALFSTEP_CHECK(config.n_layer >= 1 && config.n_layer <= kMostLayers, "GPT-2 config: n_layer is ",
                 config.n_layer, ", expected 1 to ", kMostLayers, ".");
  HALFSTEP_CHECK(config.n_embd % config.n_head == 0, "GPT-2 config: n_embd ", config.n_embd,
                 " is not divisible by n_head ", config.n_head, ".");
  for (const double p : {config.resid_pdrop, config.embd_pdrop, config.attn_pdrop})
    HALFSTEP_CHECK(p >= 0 && p < 1, "GPT-2 config: a dropout probability is ", p,
                   ", expected 0 up to below 1.");
}

struct Attention : torch::nn::Module {
  Attention(const Gpt2Config& config, int64_t layer, Uninitialized uninitialized)
      : layer(static_cast<size_t>(layer)),
        heads(config.n_head),
        attention_dropout(config.attn_pdrop),
        residual_dropout(config.resid_pdrop),
        c_attn(register_module("c_attn",
                               std::make_shared<Conv1D>(config.n_embd, 3 * config.n_embd, uninitialized))),
        c_proj(register_module("c_proj",
                               std::make_shared<Conv1D>(config.n_embd, config.n_embd, uninitialized))) {
    const auto head_size = static_cast<double>(config.n_embd / config.n_head);
    if (config.scale_attn_weights) logit_factor /= std::sqrt(head_size);
    if (config.scale_attn_by_inverse_layer_idx) logit_factor /= static_cast<double>(layer + 1);
  }

  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& mask, KeyValueCache* cache) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts =
        (*c_attn)(x).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind();
    at::Tensor key = parts[1], value = parts[2];
    if (cache) std::tie(key, value) = cache->append(layer, key, value);
    const at::Tensor attended =
        at::scaled_dot_product_attention(parts[0], key, value, mask, is_training() ? attention_dropout : 0,
                                         /*is_causal=*/!mask && length == key.size(2), logit_factor);
    const at::Tensor out = (*c_proj)(attended.transpose(1, 2).reshape({batch, length, width}));
    return at::dropout(out, residual_dropout, is_training());
  }

  size_t layer;
  int64_t heads;
  double attention_dropout, residual_dropout;
  double logit_factor = 1;
  std::shared_ptr<Conv1D> c_attn, c_proj;
};

struct FeedForward : torch::nn::Module {
  FeedForward(const Gpt2Config& config, Uninitialized uninitialized)
      : activation(models::activation_named(config.activation_function, "activation_function")),
        residual_dropout(config.resid_pdrop) {
    const int64_t width = config.n_embd, inner = config.n_inner.value_or(4 * width);
    c_fc = register_module("c_fc", std::make_shared<Conv1D>(width, inner, uninitialized));
    c_proj = register_module("c_proj", std::make_shared<Conv1D>(inner, width, uninitialized));
  }

  at::Tensor forward(const at::Tensor& x) {
    return at::dropout((*c_proj)(activation((*c_fc)(x))), residual_dropout, is_training());
  }

  models::Activation activation;
  double residual_dropout;
  std::shared_ptr<Conv1D> c_fc, c_proj;
};

struct Block : torch::nn::Module {
  Block(const Gpt2Config& config, int64_t layer, Uninitialized uninitialized) {
    const auto norm = [&] {
      return std::make_shared<LayerNorm>(config.n_embd, config.layer_norm_epsilon, uninitialized);
    };
    ln_1 = register_module("ln_1", norm());
    attn = register_module("attn", std::make_shared<Attention>(config, layer, uninitialized));
    ln_2 = register_module("ln_2", norm());
    mlp = register_module("mlp", std::make_shared<FeedForward>(config, uninitialized));
  }

  at::Tensor forward(at::Tensor x, const std::optional<at::Tensor>& mask, KeyValueCache* cache) {
    x = x + attn->forward((*ln_1)(x), mask, cache);
    return x + mlp->forward((*ln_2)(x));
  }

  std::shared_ptr<LayerNorm> ln_1, ln_2;
  std::shared_ptr<Attention> attn;
  std::shared_ptr<FeedForward> mlp;
};

}  // namespace

struct Gpt2Impl::Transformer : torch::nn::Module {
  Transformer(const Gpt2Config& config, Uninitialized uninitialized) : embedding_dropout(config.embd_pdrop) {
    wte =
        register_module("wte", std::make_shared<Embedding>(config.vocab_size, config.n_embd, uninitialized));
    wpe =
        register_module("wpe", std::make_shared<Embedding>(config.n_positions, config.n_embd, uninitialized));
    for (int64_t layer = 0; layer < config.n_layer; ++layer)
      h->push_back(std::make_shared<Block>(config, layer, uninitialized));
    register_module("h", h);
    ln_f = register_module(
        "ln_f", std::make_shared<LayerNorm>(config.n_embd, config.layer_norm_epsilon, uninitialized));
  }

  at::Tensor forward(const at::Tensor& ids, bool recompute_blocks, const Surroundings& surroundings) {
    KeyValueCache* const cache = surroundings.cache;
    // One text a row: its positions are rows of the table as they lie, whose gradient is no scatter.
    const at::Tensor positions =
        surroundings.documents.defined()
            ? (*wpe)(models::positions_of(ids, surroundings))
            : wpe->weight.narrow(0, models::length_before(surroundings), ids.size(1));
    const auto mask = models::mask_of(ids, surroundings, /*window=*/0);
    at::Tensor x = at::dropout((*wte)(ids) + positions, embedding_dropout, is_training());
    for (size_t i = 0; i < h->size(); ++i) {
      const auto block = [block = h->ptr<Block>(i), mask, cache](const at::Tensor& in) {
        return block->forward(in, mask, cache);
      };
      x = recompute_blocks && !cache ? checkpoint_activations(block, x) : block(x);
    }
    return (*ln_f)(x);
  }

  double embedding_dropout;
  std::shared_ptr<Embedding> wte, wpe;
  torch::nn::ModuleList h;
  std::shared_ptr<LayerNorm> ln_f;
};

Gpt2Impl::Gpt2Impl(Gpt2Config config, Uninitialized uninitialized) : config_(std::move(config)) {
  check_config(config_);
  transformer_ = register_module("transformer", std::make_shared<Transformer>(config_, uninitialized));
  if (config_.tie_word_embeddings) return;
  const auto head = std::make_shared<models::Linear>(config_.n_embd, config_.vocab_size, /*with_bias=*/false,
                                                     uninitialized);
  free_head_ = register_module("lm_head", head)->weight;
}

Gpt2Impl::Gpt2Impl(Gpt2Config config, uint64_t seed) : Gpt2Impl(std::move(config), Uninitialized{}) {
  Gpt2Impl::reset_parameters(seed);
}

void Gpt2Impl::reset_parameters(uint64_t seed) {
  const double deviation = config_.initializer_range;
  // Each layer adds to the residual stream twice: their sum keeps the variance of one.
  const double of_residual = deviation / std::sqrt(2.0 * static_cast<double>(config_.n_layer));
  models::draw_initial_values(*this, seed, deviation, of_residual);
}

at::Tensor Gpt2Impl::logits(const at::Tensor& ids, const Surroundings& surroundings) {
  models::check_ids(ids);
  int64_t longest = models::length_before(surroundings) + ids.size(1);
  // A long row of short texts fits. To ask for the longest one waits for an accelerator: only where it
  // counts.
  if (longest > config_.n_positions && surroundings.documents.defined())
    longest = models::positions_of(ids, surroundings).max().item<int64_t>() + 1;
  HALFSTEP_CHECK(longest <= config_.n_positions, "Gpt2: ", longest, " ids in a text; n_positions is ",
                 config_.n_positions, ".");
  const at::Tensor& head = free_head_.defined() ? free_head_ : transformer_->wte->weight;
  return at::linear(transformer_->forward(ids, recompute_blocks, surroundings), head);
}

CausalLMShape Gpt2Impl::shape() const {
  const int64_t looked_up = config_.n_positions + (config_.tie_word_embeddings ? 0 : config_.vocab_size);
  return {.family = "gpt2",
          .vocabulary = config_.vocab_size,
          .context = config_.n_positions,
          .layers = config_.n_layer,
          .width = config_.n_embd,
          .heads = config_.n_head,
          .key_value_heads = config_.n_head,
          .head_size = config_.n_embd / config_.n_head,
          .looked_up_weights = looked_up * config_.n_embd};
}

std::string Gpt2Impl::config_json() const { return json_of(config_).dump(2); }

models::Family models::gpt2_family() {
  return {
      .model_type = "gpt2",
      .prefix = "transformer.",
      .embedding = "transformer.wte.weight",
      .derived = {".attn.bias", ".attn.masked_bias"},  // the causal mask, and what stands in its place
      .open = [](const files::JsonPlace& config, Uninitialized uninitialized) -> std::shared_ptr<CausalLM> {
        return std::make_shared<Gpt2Impl>(read_config(config), uninitialized);
      },
      .config_of =
          [](const CausalLMSizes& sizes) {
            HALFSTEP_CHECK(sizes.key_value_heads.value_or(sizes.heads) == sizes.heads,
                           "gpt2: every head has its own keys and values; ", *sizes.key_value_heads,
                           " heads of keys and values for ", sizes.heads, " heads.");
            const Gpt2Config config{.vocab_size = sizes.vocabulary,
                                    .n_positions = sizes.context,
                                    .n_embd = sizes.width,
                                    .n_layer = sizes.layers,
                                    .n_head = sizes.heads,
                                    .n_inner = sizes.feed_forward_width,
                                    .resid_pdrop = sizes.dropout,
                                    .embd_pdrop = sizes.dropout,
                                    .attn_pdrop = sizes.dropout};
            return json_of(config);
          }};
}

}  // namespace halfstep
