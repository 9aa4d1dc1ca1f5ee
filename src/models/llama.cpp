// Llama: its config.json, which its relatives share, and its module over the decoder.
#include <halfstep/error.h>
#include <halfstep/models.h>

#include <cmath>
#include <tuple>

#include "models/decoder.h"

namespace halfstep {
namespace {

using files::JsonFields, files::JsonPlace;
using nlohmann::json;

RopeParameters rope_from(const JsonPlace& object, RopeParameters rope) {
  JsonFields fields(object, models::kLargestSize);
  fields.refuse("partial_rotary_factor", "heads that turn in part are not implemented.", 1.0);
  fields.read("type", rope.rope_type);  // as transformers spelt it before 4.43
  fields.read("rope_type", rope.rope_type);
  fields.read("rope_theta", rope.rope_theta);
  fields.read("factor", rope.factor);
  fields.read("low_freq_factor", rope.low_freq_factor);
  fields.read("high_freq_factor", rope.high_freq_factor);
  fields.read("original_max_position_embeddings", rope.original_max_position_embeddings);
  return rope;
}

/// transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters.
RopeParameters read_rope(JsonFields& fields, int64_t max_position_embeddings) {
  RopeParameters rope;
  fields.read("rope_theta", rope.rope_theta);
  rope.original_max_position_embeddings = max_position_embeddings;
  const JsonPlace scaling = fields.read("rope_scaling"), parameters = fields.read("rope_parameters");
  if (scaling.is_null()) return parameters.is_null() ? rope : rope_from(parameters, rope);
  const RopeParameters said = rope_from(scaling, rope);
  if (parameters.is_null()) return said;
  const RopeParameters said_again = rope_from(parameters, rope);
  const auto values = [](const RopeParameters& r) {
    return std::tie(r.rope_type, r.rope_theta, r.factor, r.low_freq_factor, r.high_freq_factor,
                    r.original_max_position_embeddings);
  };
  HALFSTEP_CHECK(values(said) == values(said_again), fields.where(),
                 ": 'rope_scaling' and 'rope_parameters' disagree; keep the one that is meant.");
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

models::DecoderConfig decoder_config(const LlamaConfig& config) {
  return {.llama = config, .output_bias = config.attention_bias};
}

}  // namespace

LlamaConfig models::read_llama_fields(JsonFields& fields, LlamaConfig config) {
  fields.refuse("quantization_config", "quantised weights are not implemented.");
  fields.refuse("partial_rotary_factor", "heads that turn in part are not implemented.", 1.0);
  fields.read("vocab_size", config.vocab_size);
  fields.read("hidden_size", config.hidden_size);
  fields.read("intermediate_size", config.intermediate_size);
  fields.read("num_hidden_layers", config.num_hidden_layers);
  fields.read("num_attention_heads", config.num_attention_heads);
  fields.read("num_key_value_heads", config.num_key_value_heads);
  fields.read("head_dim", config.head_dim);
  fields.read("max_position_embeddings", config.max_position_embeddings);
  fields.read("hidden_act", config.hidden_act);
  fields.read("rms_norm_eps", config.rms_norm_eps);
  fields.read("initializer_range", config.initializer_range);
  fields.read("attention_dropout", config.attention_dropout);
  fields.read("attention_bias", config.attention_bias);
  fields.read("mlp_bias", config.mlp_bias);
  // Not a size: 0 is a token, and -1 the last one.
  if (const JsonPlace padding = fields.read("pad_token_id"); !padding.is_null()) {
    padding.expect(padding.value().is_number_integer() &&
                       std::abs(padding.value().get<double>()) <= models::kLargestSize,
                   "a token's number");
    config.pad_token_id = padding.integer();
  }
  fields.read("tie_word_embeddings", config.tie_word_embeddings);
  config.rope = read_rope(fields, config.max_position_embeddings);
  return config;
}

json models::llama_json(const LlamaConfig& config, const char* model_type, const char* architecture) {
  auto file = json::parse(config.rest);
  file["architectures"] = {architecture};
  file["model_type"] = model_type;
  file["vocab_size"] = config.vocab_size;
  file["hidden_size"] = config.hidden_size;
  file["intermediate_size"] = config.intermediate_size;
  file["num_hidden_layers"] = config.num_hidden_layers;
  file["num_attention_heads"] = config.num_attention_heads;
  file["num_key_value_heads"] = config.num_key_value_heads.value_or(config.num_attention_heads);
  file["head_dim"] = config.head_dim.value_or(config.hidden_size / config.num_attention_heads);
  file["max_position_embeddings"] = config.max_position_embeddings;
  file["hidden_act"] = config.hidden_act;
  file["rms_norm_eps"] = config.rms_norm_eps;
  file["initializer_range"] = config.initializer_range;
  file["attention_dropout"] = config.attention_dropout;
  file["attention_bias"] = config.attention_bias;
  file["mlp_bias"] = config.mlp_bias;
  if (config.pad_token_id) file["pad_token_id"] = *config.pad_token_id;
  file["tie_word_embeddings"] = config.tie_word_embeddings;
  // Both spellings, so that both generations of transformers read it.
  file["rope_parameters"] = rope_json(config.rope);
  file["rope_theta"] = config.rope.rope_theta;
  if (config.rope.rope_type != "default") file["rope_scaling"] = rope_json(config.rope);
  return file;
}

LlamaConfig models::llama_config_of(const CausalLMSizes& sizes) {
  // Three matrices of 8/3 of the width have as many weights as two of 4 times the width.
  const int64_t usual_width = (sizes.width * 8 / 3 + 63) / 64 * 64;
  return {.vocab_size = sizes.vocabulary,
          .hidden_size = sizes.width,
          .intermediate_size = sizes.feed_forward_width.value_or(usual_width),
          .num_hidden_layers = sizes.layers,
          .num_attention_heads = sizes.heads,
          .num_key_value_heads = sizes.key_value_heads,
          .max_position_embeddings = sizes.context,
          .attention_dropout = sizes.dropout};
}

struct LlamaImpl::Body : models::DecoderBody {
  using DecoderBody::DecoderBody;
};

LlamaImpl::LlamaImpl(LlamaConfig config, Uninitialized uninitialized)
    : config_(std::move(config)),
      body_(std::make_shared<Body>(*this, decoder_config(config_), "Llama", uninitialized)) {}

LlamaImpl::LlamaImpl(LlamaConfig config, uint64_t seed) : LlamaImpl(std::move(config), Uninitialized{}) {
  LlamaImpl::reset_parameters(seed);
}

at::Tensor LlamaImpl::logits(const at::Tensor& ids, const Surroundings& surroundings) {
  return body_->logits(ids, recompute_blocks, surroundings);
}
CausalLMShape LlamaImpl::shape() const { return body_->shape("llama"); }
void LlamaImpl::reset_parameters(uint64_t seed) { body_->reset_parameters(*this, seed); }
std::string LlamaImpl::config_json() const {
  return models::llama_json(config_, "llama", "LlamaForCausalLM").dump(2);
}

models::Family models::llama_family() {
  return decoder_family(
      "llama",
      [](const JsonPlace& config, Uninitialized uninitialized) -> std::shared_ptr<CausalLM> {
        JsonFields fields(config, kLargestSize);
        const LlamaConfig defaults;
        LlamaConfig read = read_llama_fields(fields, defaults);
        read.rest = fields.rest().dump();
        return std::make_shared<LlamaImpl>(std::move(read), uninitialized);
      },
      [](const CausalLMSizes& sizes) {
        return llama_json(llama_config_of(sizes), "llama", "LlamaForCausalLM");
      });
}

}  // namespace halfstep
