#include <halfstep/error.h>

#include <cmath>
#include <tuple>

#include "models/config_fields.h"
#include "models/configs.h"
#include "models/layers.h"
#include "words/names.h"

namespace halfstep {
namespace {

using models::ConfigFields, models::kLargestSize, models::kMostLayers;
using nlohmann::json;

RopeParameters rope_from(const json& object, const ConfigFields& file, RopeParameters rope) {
  ConfigFields fields(object, file.where() + ": rope");
  fields.refuse("partial_rotary_factor", "heads that turn in part are not implemented.", 1.0);
  fields.take("type", rope.rope_type);  // as transformers spelt it before 4.43
  fields.take("rope_type", rope.rope_type);
  fields.take("rope_theta", rope.rope_theta);
  fields.take("factor", rope.factor);
  fields.take("low_freq_factor", rope.low_freq_factor);
  fields.take("high_freq_factor", rope.high_freq_factor);
  fields.take("original_max_position_embeddings", rope.original_max_position_embeddings);
  return rope;
}

/// transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters.
RopeParameters take_rope(ConfigFields& fields, int64_t max_position_embeddings) {
  RopeParameters rope;
  fields.take("rope_theta", rope.rope_theta);
  rope.original_max_position_embeddings = max_position_embeddings;
  const json scaling = fields.take("rope_scaling"), parameters = fields.take("rope_parameters");
  if (scaling.is_null()) return parameters.is_null() ? rope : rope_from(parameters, fields, rope);
  const RopeParameters said = rope_from(scaling, fields, rope);
  if (parameters.is_null()) return said;
  const RopeParameters said_again = rope_from(parameters, fields, rope);
  const auto values = [](const RopeParameters& r) {
    return std::tie(r.rope_type, r.rope_theta, r.factor, r.low_freq_factor, r.high_freq_factor,
                    r.original_max_position_embeddings);
  };
  HALFSTEP_CHECK(values(said) == values(said_again), fields.where(),
                 ": 'rope_scaling' and 'rope_parameters' say different things; keep the one that is meant.");
  return said;
}

json rope_json(const RopeParameters& rope) {
  json object{{"rope_type", rope.rope_type}, {"rope_theta", rope.rope_theta}};
  if (rope.rope_type != "default") object["factor"] = rope.factor;
  if (rope.rope_type == "llama3") {
    object["low_freq_factor"] = rope.low_freq_factor;
    object["high_freq_factor"] = rope.high_freq_factor;
    object["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  }
  return object;
}

void check_rope(const RopeParameters& rope) {
  HALFSTEP_CHECK(rope.rope_type == "default" || rope.rope_type == "linear" || rope.rope_type == "llama3",
                 "Llama config: rope_type ", in_quotes(rope.rope_type),
                 " is not implemented; these are: default, linear, llama3.");
  HALFSTEP_CHECK(rope.rope_theta > 0 && rope.factor > 0, "Llama config: rope_theta is ", rope.rope_theta,
                 " and factor ", rope.factor, "; both must be positive.");
  HALFSTEP_CHECK(rope.rope_type != "llama3" ||
                     (rope.low_freq_factor > 0 && rope.low_freq_factor < rope.high_freq_factor &&
                      rope.original_max_position_embeddings > 0),
                 "Llama config: llama3 wants 0 < low_freq_factor < high_freq_factor; they are ",
                 rope.low_freq_factor, " and ", rope.high_freq_factor, ".");
}

}  // namespace

LlamaConfig models::llama_config(const json& file, const std::string& where) {
  ConfigFields fields(file, where);
  fields.refuse("quantization_config", "quantised weights are not implemented.");
  fields.refuse("partial_rotary_factor", "heads that turn in part are not implemented.", 1.0);
  LlamaConfig config;
  fields.take("vocab_size", config.vocab_size);
  fields.take("hidden_size", config.hidden_size);
  fields.take("intermediate_size", config.intermediate_size);
  fields.take("num_hidden_layers", config.num_hidden_layers);
  fields.take("num_attention_heads", config.num_attention_heads);
  fields.take("num_key_value_heads", config.num_key_value_heads);
  fields.take("head_dim", config.head_dim);
  fields.take("max_position_embeddings", config.max_position_embeddings);
  fields.take("hidden_act", config.hidden_act);
  fields.take("rms_norm_eps", config.rms_norm_eps);
  fields.take("initializer_range", config.initializer_range);
  fields.take("attention_dropout", config.attention_dropout);
  fields.take("attention_bias", config.attention_bias);
  fields.take("mlp_bias", config.mlp_bias);
  // Not a size: 0 is a token, and -1 the last one.
  if (const json padding = fields.take("pad_token_id"); !padding.is_null()) {
    const bool small = padding.is_number_integer() && std::abs(padding.get<double>()) <= kLargestSize;
    HALFSTEP_CHECK(small, where, ": 'pad_token_id' is ", padding.dump(), ", expected a token's number.");
    config.pad_token_id = padding.get<int64_t>();
  }
  fields.take("tie_word_embeddings", config.tie_word_embeddings);
  config.rope = take_rope(fields, config.max_position_embeddings);
  config.rest = fields.rest().dump();
  return config;
}

std::string Llama::config_json() const {
  auto file = json::parse(config_.rest);
  file["architectures"] = {"LlamaForCausalLM"};
  file["model_type"] = "llama";
  file["vocab_size"] = config_.vocab_size;
  file["hidden_size"] = config_.hidden_size;
  file["intermediate_size"] = config_.intermediate_size;
  file["num_hidden_layers"] = config_.num_hidden_layers;
  file["num_attention_heads"] = config_.num_attention_heads;
  file["num_key_value_heads"] = models::key_value_heads_of(config_);
  file["head_dim"] = models::head_size_of(config_);
  file["max_position_embeddings"] = config_.max_position_embeddings;
  file["hidden_act"] = config_.hidden_act;
  file["rms_norm_eps"] = config_.rms_norm_eps;
  file["initializer_range"] = config_.initializer_range;
  file["attention_dropout"] = config_.attention_dropout;
  file["attention_bias"] = config_.attention_bias;
  file["mlp_bias"] = config_.mlp_bias;
  if (config_.pad_token_id) file["pad_token_id"] = *config_.pad_token_id;
  file["tie_word_embeddings"] = config_.tie_word_embeddings;
  // Both spellings, so that both generations of transformers read it.
  file["rope_parameters"] = rope_json(config_.rope);
  file["rope_theta"] = config_.rope.rope_theta;
  if (config_.rope.rope_type != "default") file["rope_scaling"] = rope_json(config_.rope);
  return file.dump(2);
}

void models::check_config(const LlamaConfig& config) {
  const int64_t heads = config.num_attention_heads, key_value_heads = key_value_heads_of(config);
  for (const int64_t size : {config.vocab_size, config.hidden_size, config.intermediate_size, heads,
                             key_value_heads, config.head_dim.value_or(1)})
    HALFSTEP_CHECK(size >= 1 && size <= kLargestSize, "Llama config: a size is ", size, ", expected 1 to ",
                   kLargestSize, ".");
  HALFSTEP_CHECK(config.num_hidden_layers >= 1 && config.num_hidden_layers <= kMostLayers,
                 "Llama config: num_hidden_layers is ", config.num_hidden_layers, ", expected 1 to ",
                 kMostLayers, ".");
  HALFSTEP_CHECK(config.head_dim || config.hidden_size % heads == 0, "Llama config: hidden_size ",
                 config.hidden_size, " is not divisible by num_attention_heads ", heads,
                 ", and head_dim is not given.");
  const int64_t head_size = head_size_of(config);
  HALFSTEP_CHECK(head_size % 2 == 0, "Llama config: head_dim is ", head_size,
                 ", expected an even number: rotary positions turn pairs.");
  HALFSTEP_CHECK(heads * head_size <= kLargestSize, "Llama config: ", heads, " heads of ", head_size,
                 " elements are more than ", kLargestSize, " together.");
  HALFSTEP_CHECK(heads % key_value_heads == 0, "Llama config: num_attention_heads ", heads,
                 " is not divisible by num_key_value_heads ", key_value_heads, ".");
  HALFSTEP_CHECK(config.attention_dropout >= 0 && config.attention_dropout < 1,
                 "Llama config: attention_dropout is ", config.attention_dropout,
                 ", expected 0 up to below 1.");
  const int64_t padding = config.pad_token_id.value_or(0);
  HALFSTEP_CHECK(padding >= -config.vocab_size && padding < config.vocab_size,
                 "Llama config: pad_token_id is ", padding, ", outside the vocabulary of ", config.vocab_size,
                 ".");
  check_rope(config.rope);
}

int64_t models::padding_row_of(const LlamaConfig& config) {
  if (!config.pad_token_id) return Embedding::kNoPadding;
  return *config.pad_token_id + (*config.pad_token_id < 0 ? config.vocab_size : 0);
}

}  // namespace halfstep
