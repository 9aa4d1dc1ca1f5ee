// The families of language models that Hugging Face folders hold. A family is one file, which defines its
// row, and one line of `families()`.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/models.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/json_place.h"

namespace halfstep::models {

/// What load_pretrained knows of a family.
struct Family {
  const char* model_type;  ///< config.json's
  const char* prefix;      ///< of every name but the head's; files saved from the headless model lack it
  const char* embedding;   ///< what a tied head is tied to
  std::vector<const char*>
      derived;  ///< ends of names of tensors that follow from the config; old files hold them
  /// Checks the config. The weights are left uninitialized.
  std::shared_ptr<CausalLM> (*open)(const files::JsonPlace& config, Uninitialized uninitialized);
  nlohmann::json (*config_of)(const CausalLMSizes& sizes);
};

Family gpt2_family();
Family llama_family();
Family qwen2_family();
Family qwen3_family();
Family mistral_family();

/// In the order in which errors list them.
inline const std::vector<Family>& families() {
  static const std::vector<Family> all{
      gpt2_family(), llama_family(), qwen2_family(), qwen3_family(), mistral_family(),
  };
  return all;
}

/// No size in a config may exceed it: the product of any two, in bytes, fits 63 bits.
inline constexpr int64_t kLargestSize = int64_t{1} << 27;
inline constexpr int64_t kMostLayers = 4096;

/// That ids are what an embedding takes: int64, [batch, length].
void check_ids(const at::Tensor& ids);

/// How many tokens the cache holds.
int64_t length_before(const Surroundings& surroundings);

/// The place of each id in its text: [length], or [batch, length] where rows hold several texts.
at::Tensor positions_of(const at::Tensor& ids, const Surroundings& surroundings);

/// True where an id sees one of the cache or of the call: itself and those of its text before it, within the
/// window if it is not 0. [queries, keys], or [batch, 1, queries, keys] where rows hold several texts.
/// Nothing where all is seen, or where is_causal says the same.
std::optional<at::Tensor> mask_of(const at::Tensor& ids, const Surroundings& surroundings, int64_t window);

}  // namespace halfstep::models
