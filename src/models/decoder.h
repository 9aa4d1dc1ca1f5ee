// The decoder of Llama and its relatives: rotary positions, RMS norm before each part, SwiGLU.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/models.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/family.h"

namespace halfstep::models {

/// Llama's config, and what its relatives add to it.
struct DecoderConfig {
  LlamaConfig llama{};
  bool output_bias = false;     ///< of o_proj; llama.attention_bias is that of q_proj, k_proj and v_proj
  bool query_key_norm = false;  ///< RMS norm of each head's query and key, before they turn
  std::vector<int64_t>
      windows{};  ///< per layer, how many of the last positions a query sees; 0: all. Empty: all 0
};

/// Reads the fields of LlamaConfig that stand in a config.json; `defaults` for the others.
LlamaConfig read_llama_fields(files::JsonFields& fields, LlamaConfig defaults);

/// DecoderConfig::windows: the same window in each layer from the first on that has one.
std::vector<int64_t> windows_from(int64_t first_layer, int64_t window, int64_t layers);
/// From use_sliding_window, sliding_window, max_window_layers and layer_types.
std::vector<int64_t> read_windows_by_layer(files::JsonFields& fields, int64_t layers);

/// The sizes of a new model.
LlamaConfig llama_config_of(const CausalLMSizes& sizes);
/// A config.json with all fields of LlamaConfig.
nlohmann::json llama_json(const LlamaConfig& config, const char* model_type, const char* architecture);

/// The parts of a model, registered with the module that owns them as `model` and, unless it is tied,
/// `lm_head`.
class DecoderBody {
 public:
  /// Checks the config; `name` begins every Error.
  DecoderBody(torch::nn::Module& owner, const DecoderConfig& config, const char* name,
              Uninitialized uninitialized);

  at::Tensor logits(const at::Tensor& ids, bool recompute_blocks, const Surroundings& surroundings) const;
  CausalLMShape shape(const char* family) const;
  /// As Hugging Face draws them.
  void reset_parameters(torch::nn::Module& owner, uint64_t seed) const;

 private:
  struct Model;
  LlamaConfig config_;
  std::shared_ptr<Model> model_;
  at::Tensor free_head_;
};

/// A relative of Llama that has no class of its own. It keeps the fields of its config.json and writes them
/// again.
using ReadDecoderConfig = DecoderConfig (*)(files::JsonFields& fields);
std::shared_ptr<CausalLM> open_decoder(const char* model_type, ReadDecoderConfig read,
                                       const files::JsonPlace& config, Uninitialized uninitialized);

/// A row with the tensor names that Llama and its relatives share.
Family decoder_family(const char* model_type, decltype(Family::open) open,
                      decltype(Family::config_of) config_of);

}  // namespace halfstep::models
