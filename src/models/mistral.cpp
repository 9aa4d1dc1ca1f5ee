// Mistral: Llama whose layers may all have one sliding window.
#include <utility>

#include "models/decoder.h"

namespace halfstep::models {
namespace {

/// The defaults are Hugging Face's.
DecoderConfig read_config(files::JsonFields& fields) {
  const LlamaConfig defaults{
      .intermediate_size = 14336, .num_key_value_heads = 8, .max_position_embeddings = int64_t{1} << 17};
  LlamaConfig llama = read_llama_fields(fields, defaults);
  llama.attention_bias = llama.mlp_bias = false;  // transformers has no such fields here
  fields.refuse("layer_types", "layers of several kinds are not implemented for mistral.");
  int64_t window = 4096;
  fields.read("sliding_window", window);
  if (fields.is_null("sliding_window")) window = 0;
  auto windows = windows_from(/*first_layer=*/0, window, llama.num_hidden_layers);
  return {.llama = std::move(llama), .windows = std::move(windows)};
}

nlohmann::json config_of(const CausalLMSizes& sizes) {
  nlohmann::json config = llama_json(llama_config_of(sizes), "mistral", "MistralForCausalLM");
  for (const char* key : {"attention_bias", "mlp_bias"}) config.erase(key);
  config["sliding_window"] = nullptr;
  return config;
}

}  // namespace

Family mistral_family() {
  return decoder_family(
      "mistral",
      [](const files::JsonPlace& config, Uninitialized uninitialized) {
        return open_decoder("mistral", read_config, config, uninitialized);
      },
      config_of);
}

}  // namespace halfstep::models
