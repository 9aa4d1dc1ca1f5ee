// Qwen3: Llama with an RMS norm of each head's query and key; later layers may have a sliding window.
#include <utility>

#include "models/decoder.h"

namespace halfstep::models {
namespace {

/// The defaults are Hugging Face's.
DecoderConfig read_config(files::JsonFields& fields) {
  const LlamaConfig defaults{.vocab_size = 151936,
                             .intermediate_size = 22016,
                             .num_key_value_heads = 32,
                             .head_dim = 128,
                             .max_position_embeddings = 32768};
  LlamaConfig llama = read_llama_fields(fields, defaults);
  llama.mlp_bias = false;  // transformers has no such field here
  const bool bias = llama.attention_bias;
  auto windows = read_windows_by_layer(fields, llama.num_hidden_layers);
  return {
      .llama = std::move(llama), .output_bias = bias, .query_key_norm = true, .windows = std::move(windows)};
}

nlohmann::json config_of(const CausalLMSizes& sizes) {
  nlohmann::json config = llama_json(llama_config_of(sizes), "qwen3", "Qwen3ForCausalLM");
  config.erase("mlp_bias");
  return config;
}

}  // namespace

Family qwen3_family() {
  return decoder_family(
      "qwen3",
      [](const files::JsonPlace& config, Uninitialized uninitialized) {
        return open_decoder("qwen3", read_config, config, uninitialized);
      },
      config_of);
}

}  // namespace halfstep::models
