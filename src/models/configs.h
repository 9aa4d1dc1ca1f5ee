// config.json: read from strangers, checked, written.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/models.h>

#include <nlohmann/json.hpp>
#include <string>

namespace halfstep::models {

/// `where` begins every Error: the file's path.
Gpt2Config gpt2_config(const nlohmann::json& file, const std::string& where);
LlamaConfig llama_config(const nlohmann::json& file, const std::string& where);

/// That the numbers fit one another and nothing overflows.
void check_config(const Gpt2Config& config);
void check_config(const LlamaConfig& config);

inline int64_t head_size_of(const LlamaConfig& config) {
  return config.head_dim.value_or(config.hidden_size / config.num_attention_heads);
}
inline int64_t key_value_heads_of(const LlamaConfig& config) {
  return config.num_key_value_heads.value_or(config.num_attention_heads);
}

/// The row of the embedding that gets no gradient as an input; -1 for none.
int64_t padding_row_of(const LlamaConfig& config);

/// That ids are what an embedding takes: int64, [batch, length].
void check_ids(const at::Tensor& ids);

}  // namespace halfstep::models
