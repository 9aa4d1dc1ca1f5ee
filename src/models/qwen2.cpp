// Qwen2 and Qwen2.5: Llama with biases of queries, keys and values; later layers may have a sliding window.
#include <utility>

#include "models/decoder.h"

namespace halfstep::models {
namespace {

/// The defaults are Hugging Face's.
DecoderConfig read_config(files::JsonFields& fields) {
  const LlamaConfig defaults{.vocab_size = 151936,
                             .intermediate_size = 22016,
                             .num_key_value_heads = 32,
                             .max_position_embeddings = 32768};
  LlamaConfig llama = read_llama_fields(fields, defaults);
  // transformers has no such fields here.
  llama.attention_bias = true;
  llama.mlp_bias = false;
  auto windows = read_windows_by_layer(fields, llama.num_hidden_layers);
  return {.llama = std::move(llama), .windows = std::move(windows)};
}

nlohmann::json config_of(const CausalLMSizes& sizes) {
  nlohmann::json config = llama_json(llama_config_of(sizes), "qwen2", "Qwen2ForCausalLM");
  for (const char* key : {"attention_bias", "mlp_bias"}) config.erase(key);
  return config;
}

}  // namespace

Family qwen2_family() {
  return decoder_family(
      "qwen2",
      [](const files::JsonPlace& config, Uninitialized uninitialized) {
        return open_decoder("qwen2", read_config, config, uninitialized);
      },
      config_of);
}

}  // namespace halfstep::models
