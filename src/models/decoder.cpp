// Members that are registered carry the names that Llama's files use.
#include "models/decoder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <halfstep/functions.h>
#include <torch/nn/modules/container/modulelist.h>

#include <map>
#include <numbers>
#include <optional>
#include <tuple>
#include <utility>

#include "models/layers.h"
#include "words/names.h"

namespace halfstep::models {
namespace {

// Rotary positions, as Hugging Face has them: element i of a head's first half turns with element i of its
// second half.

/// cos and sin of every angle, [length, head_dim] or [batch, 1, length, head_dim], FP32.
struct Rotation {
  at::Tensor cos, sin;
};

/// Llama 3.1: pairs that turn fully within the old context keep their speed, those far slower turn `factor`
/// times slower still, those between are between.
at::Tensor stretched(const at::Tensor& speeds, const RopeParameters& rope) {
  const auto old_context = static_cast<double>(rope.original_max_position_embeddings);
  const double slow_from = old_context / rope.low_freq_factor, fast_to = old_context / rope.high_freq_factor;
  const at::Tensor positions_per_turn = 2 * std::numbers::pi / speeds;
  const at::Tensor quickness = (old_context / positions_per_turn - rope.low_freq_factor) /
                               (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor between = (1 - quickness) * speeds / rope.factor + quickness * speeds;
  const at::Tensor slow = positions_per_turn > slow_from, fast = positions_per_turn < fast_to;
  return at::where(slow, speeds / rope.factor, at::where(fast, speeds, between));
}

at::Tensor speeds_of(const RopeParameters& rope, int64_t head_dim, at::TensorOptions fp32) {
  const at::Tensor exponents = at::arange(0, head_dim, 2, fp32) / head_dim;
  const at::Tensor speeds = 1.0 / at::pow(rope.rope_theta, exponents);
  if (rope.rope_type == "linear") return speeds / rope.factor;
  if (rope.rope_type == "llama3") return stretched(speeds, rope);
  return speeds;
}

/// The angles of positions, [length] or [batch, length], in the arithmetic of transformers step by step:
/// FP32, whose rounding at far positions the published weights were trained with.
Rotation rotation_of(const RopeParameters& rope, int64_t head_dim, const at::Tensor& positions) {
  const at::NoGradGuard no_grad;
  const auto fp32 = positions.options().dtype(at::kFloat);
  const at::Tensor half = positions.to(at::kFloat).unsqueeze(-1) * speeds_of(rope, head_dim, fp32);
  at::Tensor angles = at::cat({half, half}, -1);
  if (positions.dim() == 2) angles = angles.unsqueeze(1);  // the same for all heads
  return {.cos = angles.cos(), .sin = angles.sin()};
}

int64_t head_size_of(const LlamaConfig& config) {
  return config.head_dim.value_or(config.hidden_size / config.num_attention_heads);
}

int64_t key_value_heads_of(const LlamaConfig& config) {
  return config.num_key_value_heads.value_or(config.num_attention_heads);
}

/// The row of the embedding that gets no gradient as an input; -1 for none.
int64_t padding_row_of(const LlamaConfig& config) {
  if (!config.pad_token_id) return Embedding::kNoPadding;
  return *config.pad_token_id + (*config.pad_token_id < 0 ? config.vocab_size : 0);
}

/// What every block is given beside its input.
struct Positions {
  Rotation rotation;
  std::map<int64_t, std::optional<at::Tensor>> masks;  ///< by window; 0: that of none
};

Positions rotated_positions_of(const DecoderConfig& config, const at::Tensor& ids,
                               const Surroundings& surroundings) {
  Positions positions{
      .rotation = rotation_of(config.llama.rope, head_size_of(config.llama), positions_of(ids, surroundings)),
      .masks = {{0, mask_of(ids, surroundings, /*window=*/0)}}};
  for (const int64_t window : config.windows)
    if (!positions.masks.contains(window))
      positions.masks.emplace(window, mask_of(ids, surroundings, window));
  return positions;
}

struct Attention : torch::nn::Module {
  Attention(const DecoderConfig& config, size_t layer, Uninitialized uninitialized)
      : layer(layer),
        heads(config.llama.num_attention_heads),
        key_value_heads(key_value_heads_of(config.llama)),
        head_size(head_size_of(config.llama)),
        window(layer < config.windows.size() ? config.windows[layer] : 0),
        dropout(config.llama.attention_dropout) {
    const int64_t width = config.llama.hidden_size;
    const auto linear = [&](const char* name, int64_t inputs, int64_t outputs, bool bias) {
      return register_module(name, std::make_shared<Linear>(inputs, outputs, bias, uninitialized));
    };
    const bool bias = config.llama.attention_bias;
    q_proj = linear("q_proj", width, heads * head_size, bias);
    k_proj = linear("k_proj", width, key_value_heads * head_size, bias);
    v_proj = linear("v_proj", width, key_value_heads * head_size, bias);
    o_proj = linear("o_proj", heads * head_size, width, config.output_bias);
    if (!config.query_key_norm) return;
    const auto norm = [&](const char* name) {
      return register_module(name,
                             std::make_shared<RmsNorm>(head_size, config.llama.rms_norm_eps, uninitialized));
    };
    q_norm = norm("q_norm");
    k_norm = norm("k_norm");
  }

  at::Tensor forward(const at::Tensor& x, const Positions& positions, KeyValueCache* cache) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto by_head = [&](const at::Tensor& rows, int64_t head_count, const RmsNorm* norm = nullptr) {
      const at::Tensor heads_apart = rows.view({batch, length, head_count, head_size});
      return (norm != nullptr ? (*norm)(heads_apart) : heads_apart).transpose(1, 2);
    };
    const auto& [cos, sin] = positions.rotation;
    const at::Tensor query = rotary(by_head((*q_proj)(x), heads, q_norm.get()), cos, sin);
    at::Tensor key = rotary(by_head((*k_proj)(x), key_value_heads, k_norm.get()), cos, sin);
    at::Tensor value = by_head((*v_proj)(x), key_value_heads);
    if (cache) std::tie(key, value) = cache->append(layer, key, value);
    const std::optional<at::Tensor>& mask = positions.masks.at(window);
    // With enable_gqa LibTorch shares each head of keys and values between several queries' by itself, which
    // on the CPU is quicker than copies of them (docs/models.md).
    const at::Tensor attended =
        at::scaled_dot_product_attention(query, key, value, mask, is_training() ? dropout : 0,
                                         /*is_causal=*/!mask && length == key.size(2), /*scale=*/std::nullopt,
                                         /*enable_gqa=*/heads != key_value_heads);
    return (*o_proj)(attended.transpose(1, 2).reshape({batch, length, heads * head_size}));
  }

  size_t layer;
  int64_t heads, key_value_heads, head_size, window;
  double dropout;
  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;
  std::shared_ptr<RmsNorm> q_norm, k_norm;
};

/// SwiGLU, or another activation in the place of SiLU: one product decides how much of the other passes.
struct FeedForward : torch::nn::Module {
  FeedForward(const LlamaConfig& config, Uninitialized uninitialized)
      : activation(activation_named(config.hidden_act, "hidden_act")), is_swiglu(is_silu(config.hidden_act)) {
    const auto linear = [&](const char* name, int64_t inputs, int64_t outputs) {
      return register_module(name, std::make_shared<Linear>(inputs, outputs, config.mlp_bias, uninitialized));
    };
    gate_proj = linear("gate_proj", config.hidden_size, config.intermediate_size);
    up_proj = linear("up_proj", config.hidden_size, config.intermediate_size);
    down_proj = linear("down_proj", config.intermediate_size, config.hidden_size);
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor gate = (*gate_proj)(x), up = (*up_proj)(x);
    return (*down_proj)(is_swiglu ? swiglu(gate, up) : activation(gate) * up);
  }

  Activation activation;
  bool is_swiglu;
  std::shared_ptr<Linear> gate_proj, up_proj, down_proj;
};

struct Block : torch::nn::Module {
  Block(const DecoderConfig& config, size_t layer, Uninitialized uninitialized) {
    const auto norm = [&] {
      return std::make_shared<RmsNorm>(config.llama.hidden_size, config.llama.rms_norm_eps, uninitialized);
    };
    self_attn = register_module("self_attn", std::make_shared<Attention>(config, layer, uninitialized));
    mlp = register_module("mlp", std::make_shared<FeedForward>(config.llama, uninitialized));
    input_layernorm = register_module("input_layernorm", norm());
    post_attention_layernorm = register_module("post_attention_layernorm", norm());
  }

  at::Tensor forward(at::Tensor x, const Positions& positions, KeyValueCache* cache) {
    x = x + self_attn->forward((*input_layernorm)(x), positions, cache);
    return x + mlp->forward((*post_attention_layernorm)(x));
  }

  std::shared_ptr<Attention> self_attn;
  std::shared_ptr<FeedForward> mlp;
  std::shared_ptr<RmsNorm> input_layernorm, post_attention_layernorm;
};

void check_rope(const RopeParameters& rope, const char* name) {
  HALFSTEP_CHECK(rope.rope_type == "default" || rope.rope_type == "linear" || rope.rope_type == "llama3",
                 name, " config: rope_type ", in_quotes(rope.rope_type),
                 " is not implemented; these are: default, linear, llama3.");
  HALFSTEP_CHECK(rope.rope_theta > 0 && rope.factor > 0, name, " config: rope_theta is ", rope.rope_theta,
                 " and factor ", rope.factor, "; both must be positive.");
  HALFSTEP_CHECK(rope.rope_type != "llama3" ||
                     (rope.low_freq_factor > 0 && rope.low_freq_factor < rope.high_freq_factor &&
                      rope.original_max_position_embeddings > 0),
                 name, " config: llama3 wants 0 < low_freq_factor < high_freq_factor; they are ",
                 rope.low_freq_factor, " and ", rope.high_freq_factor, ".");
}

/// That the numbers fit one another and nothing overflows.
void check_config(const LlamaConfig& config, const char* name) {
  const int64_t heads = config.num_attention_heads, key_value_heads = key_value_heads_of(config);
  for (const int64_t size : {config.vocab_size, config.hidden_size, config.intermediate_size, heads,
                             key_value_heads, config.head_dim.value_or(1)})
    HALFSTEP_CHECK(size >= 1 && size <= kLargestSize, name, " config: a size is ", size, ", expected 1 to ",
                   kLargestSize, ".");
  HALFSTEP_CHECK(config.num_hidden_layers >= 1 && config.num_hidden_layers <= kMostLayers, name,
                 " config: num_hidden_layers is ", config.num_hidden_layers, ", expected 1 to ", kMostLayers,
                 ".");
  HALFSTEP_CHECK(config.head_dim || config.hidden_size % heads == 0, name, " config: hidden_size ",
                 config.hidden_size, " is not divisible by num_attention_heads ", heads,
                 ", and head_dim is not given.");
  const int64_t head_size = head_size_of(config);
  HALFSTEP_CHECK(head_size % 2 == 0, name, " config: head_dim is ", head_size,
                 ", expected an even number: rotary positions turn pairs.");
  HALFSTEP_CHECK(heads * head_size <= kLargestSize, name, " config: ", heads, " heads of ", head_size,
                 " elements are more than ", kLargestSize, " together.");
  HALFSTEP_CHECK(heads % key_value_heads == 0, name, " config: num_attention_heads ", heads,
                 " is not divisible by num_key_value_heads ", key_value_heads, ".");
  HALFSTEP_CHECK(config.attention_dropout >= 0 && config.attention_dropout < 1, name,
                 " config: attention_dropout is ", config.attention_dropout, ", expected 0 up to below 1.");
  const int64_t padding = config.pad_token_id.value_or(0);
  HALFSTEP_CHECK(padding >= -config.vocab_size && padding < config.vocab_size, name,
                 " config: pad_token_id is ", padding, ", outside the vocabulary of ", config.vocab_size,
                 ".");
  check_rope(config.rope, name);
}

const DecoderConfig& checked(const DecoderConfig& config, const char* name) {
  check_config(config.llama, name);
  return config;
}

}  // namespace

struct DecoderBody::Model : torch::nn::Module {
  Model(const DecoderConfig& given, Uninitialized uninitialized) : config(given) {
    const LlamaConfig& llama = config.llama;
    embed_tokens =
        register_module("embed_tokens", std::make_shared<Embedding>(llama.vocab_size, llama.hidden_size,
                                                                    uninitialized, padding_row_of(llama)));
    for (size_t layer = 0; layer < static_cast<size_t>(llama.num_hidden_layers); ++layer)
      layers->push_back(std::make_shared<Block>(config, layer, uninitialized));
    register_module("layers", layers);
    norm = register_module("norm",
                           std::make_shared<RmsNorm>(llama.hidden_size, llama.rms_norm_eps, uninitialized));
  }

  at::Tensor forward(const at::Tensor& ids, bool recompute_blocks, const Surroundings& surroundings) {
    KeyValueCache* const cache = surroundings.cache;
    const Positions positions = rotated_positions_of(config, ids, surroundings);
    at::Tensor x = (*embed_tokens)(ids);
    for (size_t i = 0; i < layers->size(); ++i) {
      const auto block = [block = layers->ptr<Block>(i), positions, cache](const at::Tensor& in) {
        return block->forward(in, positions, cache);
      };
      x = recompute_blocks && !cache ? checkpoint_activations(block, x) : block(x);
    }
    return (*norm)(x);
  }

  DecoderConfig config;
  std::shared_ptr<Embedding> embed_tokens;
  torch::nn::ModuleList layers;
  std::shared_ptr<RmsNorm> norm;
};

DecoderBody::DecoderBody(torch::nn::Module& owner, const DecoderConfig& config, const char* name,
                         Uninitialized uninitialized)
    : config_(checked(config, name).llama),
      model_(owner.register_module("model", std::make_shared<Model>(config, uninitialized))) {
  if (config_.tie_word_embeddings) return;
  const auto head =
      std::make_shared<Linear>(config_.hidden_size, config_.vocab_size, /*with_bias=*/false, uninitialized);
  free_head_ = owner.register_module("lm_head", head)->weight;
}

at::Tensor DecoderBody::logits(const at::Tensor& ids, bool recompute_blocks,
                               const Surroundings& surroundings) const {
  check_ids(ids);
  const at::Tensor& head = free_head_.defined() ? free_head_ : model_->embed_tokens->weight;
  return at::linear(model_->forward(ids, recompute_blocks, surroundings), head);
}

CausalLMShape DecoderBody::shape(const char* family) const {
  return {.family = family,
          .vocabulary = config_.vocab_size,
          .context = config_.max_position_embeddings,
          .layers = config_.num_hidden_layers,
          .width = config_.hidden_size,
          .heads = config_.num_attention_heads,
          .key_value_heads = key_value_heads_of(config_),
          .head_size = head_size_of(config_),
          .looked_up_weights = config_.tie_word_embeddings ? 0 : config_.vocab_size * config_.hidden_size};
}

void DecoderBody::reset_parameters(torch::nn::Module& owner, uint64_t seed) const {
  draw_initial_values(owner, seed, config_.initializer_range, config_.initializer_range);
  const at::NoGradGuard no_grad;
  if (config_.pad_token_id) model_->embed_tokens->weight[padding_row_of(config_)].zero_();
}

namespace {

/// A relative of Llama. Nothing in its config changes, so that the fields of its file are kept as they were.
class DecoderLM final : public CausalLM {
 public:
  DecoderLM(const char* model_type, const DecoderConfig& config, nlohmann::json file,
            Uninitialized uninitialized)
      : model_type_(model_type), file_(std::move(file)), body_(*this, config, model_type, uninitialized) {}

  CausalLMShape shape() const override { return body_.shape(model_type_); }
  void reset_parameters(uint64_t seed) override { body_.reset_parameters(*this, seed); }
  std::string config_json() const override { return file_.dump(2); }

 private:
  at::Tensor logits(const at::Tensor& ids, const Surroundings& surroundings) override {
    return body_.logits(ids, recompute_blocks, surroundings);
  }

  const char* model_type_;
  nlohmann::json file_;
  DecoderBody body_;
};

}  // namespace

std::vector<int64_t> windows_from(int64_t first_layer, int64_t window, int64_t layers) {
  HALFSTEP_CHECK(layers <= kMostLayers, "num_hidden_layers is ", layers, ", expected 1 to ", kMostLayers,
                 ".");
  std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
  for (int64_t layer = first_layer; layer < layers; ++layer) windows[static_cast<size_t>(layer)] = window;
  return windows;
}

std::vector<int64_t> read_windows_by_layer(files::JsonFields& fields, int64_t layers) {
  bool in_use = false;
  int64_t window = 4096, first_layer = 28;
  fields.read("use_sliding_window", in_use);
  fields.read("sliding_window", window);
  if (!in_use || fields.is_null("sliding_window")) window = 0;
  if (const auto given = fields.read("max_window_layers"); !given.is_null()) {
    first_layer = given.integer();
    given.expect(first_layer >= 0, "a number of layers");
  }
  const auto types = fields.read("layer_types");
  if (types.is_null()) return windows_from(first_layer, window, layers);
  std::vector<int64_t> windows;
  for (const auto& type : types.elements()) {
    const bool sliding = type.text() == "sliding_attention";
    type.expect(sliding || type.text() == "full_attention", "full_attention or sliding_attention");
    HALFSTEP_CHECK(!sliding || window > 0, type.where(),
                   ": is sliding_attention, and use_sliding_window and sliding_window give no window.");
    windows.push_back(sliding ? window : 0);
  }
  HALFSTEP_CHECK(std::ssize(windows) == layers, types.where(), ": has ", windows.size(), " elements for ",
                 layers, " layers.");
  return windows;
}

std::shared_ptr<CausalLM> open_decoder(const char* model_type, ReadDecoderConfig read,
                                       const files::JsonPlace& config, Uninitialized uninitialized) {
  files::JsonFields fields(config, kLargestSize);
  return std::make_shared<DecoderLM>(model_type, read(fields), config.value(), uninitialized);
}

Family decoder_family(const char* model_type, decltype(Family::open) open,
                      decltype(Family::config_of) config_of) {
  return {.model_type = model_type,
          .prefix = "model.",
          .embedding = "model.embed_tokens.weight",
          .derived = {".rotary_emb.inv_freq"},
          .open = open,
          .config_of = config_of};
}

}  // namespace halfstep::models
