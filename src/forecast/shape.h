// The sizes of a language model, from which its parameters, its memory and its arithmetic follow.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::forecast {

/// A linear layer of a block.
struct Linear {
  int64_t outputs = 0, inputs = 0;
  bool has_bias = false;

  int64_t weights() const { return outputs * inputs; }
};

/// GPT-2, or Llama and its relatives.
struct ModelShape {
  std::string name{};    ///< for people
  std::string family{};  ///< config.json's model_type
  int64_t vocabulary = 0;
  int64_t context = 0;  ///< the longest sequence
  int64_t layers = 0;
  int64_t width = 0;
  int64_t heads = 0, key_value_heads = 0;
  int64_t head_size = 0;
  int64_t feed_forward_width = 0;
  bool is_tied = false;  ///< the head is the embedding
  bool has_query_bias = false, has_output_bias = false, has_feed_forward_bias = false;
  bool has_query_key_norm = false;

  bool is_gpt2() const { return family == "gpt2"; }
  int64_t query_width() const { return heads * head_size; }
  int64_t key_width() const { return key_value_heads * head_size; }
  /// Elements of the embedding, and of the head.
  int64_t embedding_weights() const { return vocabulary * width; }

  /// Of one block, in the order in which forward uses them.
  std::vector<Linear> block_linears() const;
  /// Elements of each parameter of one block.
  std::vector<int64_t> block_parameter_sizes() const;
  int64_t block_parameters() const;
  /// Elements of the matrices of one block's linear layers.
  int64_t block_matrix_elements() const;
  /// Elements of the parameters before the first block, and behind the last.
  std::vector<int64_t> first_parameter_sizes() const;
  std::vector<int64_t> last_parameter_sizes() const;
  /// Those of no block.
  int64_t outer_parameters() const;
  int64_t parameters() const;

  /// Operations of forward and backward per token, as CausalLM::flops_per_token counts them: two for each
  /// weight of a product in forward and four in backward; attention over half of the sequence.
  double flops_per_token(int64_t sequence_length) const;
};

/// A published model.
struct KnownShape {
  std::string_view name;
  std::string_view source;  ///< whose config.json
  std::string_view config_json;
};
std::span<const KnownShape> known_shapes();

/// The shape of a Hugging Face config.json; `where` begins every Error. Fields that change neither the
/// parameters nor the arithmetic are not looked at.
ModelShape read_shape(std::string_view config_json, const std::string& where);

}  // namespace halfstep::forecast
