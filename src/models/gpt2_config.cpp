#include <halfstep/error.h>

#include "models/config_fields.h"
#include "models/configs.h"

namespace halfstep {

Gpt2Config models::gpt2_config(const nlohmann::json& file, const std::string& where) {
  ConfigFields fields(file, where);
  // transformers takes these too, as other names of n_embd and its kin. No published file has them, and one
  // that was overlooked would leave a default in its place.
  for (const char* alias :
       {"hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"})
    fields.refuse(alias, "GPT-2's own names are n_embd, n_head, n_layer and n_positions.");
  fields.refuse("add_cross_attention", "cross-attention is not implemented.");
  fields.refuse("quantization_config", "quantised weights are not implemented.");
  Gpt2Config config;
  fields.take("vocab_size", config.vocab_size);
  fields.take("n_positions", config.n_positions);
  fields.take("n_embd", config.n_embd);
  fields.take("n_layer", config.n_layer);
  fields.take("n_head", config.n_head);
  fields.take("n_inner", config.n_inner);
  fields.take("activation_function", config.activation_function);
  fields.take("resid_pdrop", config.resid_pdrop);
  fields.take("embd_pdrop", config.embd_pdrop);
  fields.take("attn_pdrop", config.attn_pdrop);
  fields.take("layer_norm_epsilon", config.layer_norm_epsilon);
  fields.take("initializer_range", config.initializer_range);
  fields.take("scale_attn_weights", config.scale_attn_weights);
  fields.take("scale_attn_by_inverse_layer_idx", config.scale_attn_by_inverse_layer_idx);
  fields.take("tie_word_embeddings", config.tie_word_embeddings);
  config.rest = fields.rest().dump();
  return config;
}

std::string Gpt2::config_json() const {
  auto file = nlohmann::json::parse(config_.rest);
  file["architectures"] = {"GPT2LMHeadModel"};
  file["model_type"] = "gpt2";
  file["vocab_size"] = config_.vocab_size;
  file["n_positions"] = config_.n_positions;
  file["n_embd"] = config_.n_embd;
  file["n_layer"] = config_.n_layer;
  file["n_head"] = config_.n_head;
  file["n_inner"] = config_.n_inner ? nlohmann::json(*config_.n_inner) : nlohmann::json();
  file["activation_function"] = config_.activation_function;
  file["resid_pdrop"] = config_.resid_pdrop;
  file["embd_pdrop"] = config_.embd_pdrop;
  file["attn_pdrop"] = config_.attn_pdrop;
  file["layer_norm_epsilon"] = config_.layer_norm_epsilon;
  file["initializer_range"] = config_.initializer_range;
  file["scale_attn_weights"] = config_.scale_attn_weights;
  file["scale_attn_by_inverse_layer_idx"] = config_.scale_attn_by_inverse_layer_idx;
  file["tie_word_embeddings"] = config_.tie_word_embeddings;
  return file.dump(2);
}

void models::check_config(const Gpt2Config& config) {
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

}  // namespace halfstep
