#include "forecast/shape.h"

#include <halfstep/error.h>

#include <array>
#include <numeric>
#include <optional>

#include "io/json.h"
#include "io/json_place.h"
#include "words/names.h"

namespace halfstep::forecast {
namespace {

/// As the models have it: the product of any two sizes, in bytes, fits 63 bits.
constexpr int64_t kLargestSize = int64_t{1} << 27;
constexpr int64_t kMostLayers = 4096;

int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

/// Weight and bias of a norm, or the weight alone.
void add_norm(const ModelShape& shape, int64_t width, std::vector<int64_t>& sizes) {
  sizes.push_back(width);
  if (shape.is_gpt2()) sizes.push_back(width);
}

/// A size that has no default here: a forecast of a guessed size would be wrong silently.
int64_t needed(files::JsonFields& fields, const char* key) {
  int64_t size = 0;
  fields.read(key, size);
  HALFSTEP_CHECK(size > 0, fields.where(), ": has no '", key, "'.");
  return size;
}

ModelShape read_gpt2(files::JsonFields& fields) {
  ModelShape shape{.family = "gpt2", .is_tied = true};
  shape.vocabulary = needed(fields, "vocab_size");
  shape.context = needed(fields, "n_positions");
  shape.layers = needed(fields, "n_layer");
  shape.width = needed(fields, "n_embd");
  shape.heads = shape.key_value_heads = needed(fields, "n_head");
  shape.feed_forward_width = 4 * shape.width;
  fields.read("n_inner", shape.feed_forward_width);
  fields.read("tie_word_embeddings", shape.is_tied);
  shape.has_query_bias = shape.has_output_bias = shape.has_feed_forward_bias = true;
  return shape;
}

ModelShape read_llama(files::JsonFields& fields, const std::string& family) {
  ModelShape shape{.family = family};
  shape.vocabulary = needed(fields, "vocab_size");
  shape.context = needed(fields, "max_position_embeddings");
  shape.layers = needed(fields, "num_hidden_layers");
  shape.width = needed(fields, "hidden_size");
  shape.heads = shape.key_value_heads = needed(fields, "num_attention_heads");
  fields.read("num_key_value_heads", shape.key_value_heads);
  shape.feed_forward_width = needed(fields, "intermediate_size");
  fields.read("head_dim", shape.head_size);
  fields.read("tie_word_embeddings", shape.is_tied);
  if (family == "qwen2") shape.has_query_bias = true;
  if (family == "llama" || family == "qwen3") {
    fields.read("attention_bias", shape.has_query_bias);
    shape.has_output_bias = shape.has_query_bias;
  }
  if (family == "llama") fields.read("mlp_bias", shape.has_feed_forward_bias);
  shape.has_query_key_norm = family == "qwen3";
  return shape;
}

constexpr std::array<KnownShape, 9> kKnownShapes = {{
    {"gpt2-124m", "openai-community/gpt2",
     R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
         "n_head": 12})"},
    {"gpt2-1.5b", "openai-community/gpt2-xl",
     R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 48,
         "n_head": 25})"},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M",
     R"({"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "hidden_size": 576,
         "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "tie_word_embeddings": true})"},
    {"llama-1b", "meta-llama/Llama-3.2-1B",
     R"({"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "hidden_size": 2048,
         "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "tie_word_embeddings": true})"},
    {"llama-8b", "meta-llama/Llama-3.1-8B",
     R"({"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "hidden_size": 4096,
         "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8})"},
    {"llama-70b", "meta-llama/Llama-3.1-70B",
     R"({"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "hidden_size": 8192,
         "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8})"},
    {"llama-405b", "meta-llama/Llama-3.1-405B",
     R"({"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "hidden_size": 16384,
         "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
         "num_key_value_heads": 8})"},
    {"mistral-7b", "mistralai/Mistral-7B-v0.1",
     R"({"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768, "hidden_size": 4096,
         "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8})"},
    {"qwen3-8b", "Qwen/Qwen3-8B",
     R"({"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "hidden_size": 4096,
         "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128})"},
}};

}  // namespace

std::vector<Linear> ModelShape::block_linears() const {
  if (is_gpt2())
    return {{3 * width, width, has_query_bias},
            {width, width, has_output_bias},
            {feed_forward_width, width, has_feed_forward_bias},
            {width, feed_forward_width, has_feed_forward_bias}};
  return {{query_width(), width, has_query_bias},
          {key_width(), width, has_query_bias},
          {key_width(), width, has_query_bias},
          {width, query_width(), has_output_bias},
          {feed_forward_width, width, has_feed_forward_bias},
          {feed_forward_width, width, has_feed_forward_bias},
          {width, feed_forward_width, has_feed_forward_bias}};
}

std::vector<int64_t> ModelShape::block_parameter_sizes() const {
  std::vector<int64_t> sizes;
  for (const Linear& linear : block_linears()) {
    sizes.push_back(linear.weights());
    if (linear.has_bias) sizes.push_back(linear.outputs);
  }
  add_norm(*this, width, sizes);
  add_norm(*this, width, sizes);
  if (has_query_key_norm) sizes.insert(sizes.end(), 2, head_size);
  return sizes;
}

int64_t ModelShape::block_matrix_elements() const {
  int64_t all = 0;
  for (const Linear& linear : block_linears()) all += linear.weights();
  return all;
}

int64_t ModelShape::block_parameters() const { return sum(block_parameter_sizes()); }

std::vector<int64_t> ModelShape::first_parameter_sizes() const {
  std::vector<int64_t> sizes{embedding_weights()};
  if (is_gpt2()) sizes.push_back(context * width);
  return sizes;
}

std::vector<int64_t> ModelShape::last_parameter_sizes() const {
  std::vector<int64_t> sizes;
  add_norm(*this, width, sizes);
  if (!is_tied) sizes.push_back(embedding_weights());
  return sizes;
}

int64_t ModelShape::outer_parameters() const {
  return sum(first_parameter_sizes()) + sum(last_parameter_sizes());
}

int64_t ModelShape::parameters() const { return layers * block_parameters() + outer_parameters(); }

double ModelShape::flops_per_token(int64_t sequence_length) const {
  int64_t multiplied = embedding_weights();  // by the head
  for (const Linear& linear : block_linears()) multiplied += layers * linear.weights();
  const double attention = static_cast<double>(layers * query_width()) * static_cast<double>(sequence_length);
  return 6 * (static_cast<double>(multiplied) + attention);
}

std::span<const KnownShape> known_shapes() { return kKnownShapes; }

ModelShape read_shape(std::string_view config_json, const std::string& where) {
  const nlohmann::json file = files::read_json(config_json, where);
  const files::JsonPlace place(file, where);
  files::JsonFields fields(place, kLargestSize);
  std::string family;
  fields.read("model_type", family);
  const bool is_relative = family == "llama" || family == "mistral" || family == "qwen2" || family == "qwen3";
  HALFSTEP_CHECK(is_relative || family == "gpt2", where, ": model_type is ", in_quotes(family),
                 "; a forecast knows gpt2, llama, mistral, qwen2 and qwen3.");
  ModelShape shape = is_relative ? read_llama(fields, family) : read_gpt2(fields);
  HALFSTEP_CHECK(shape.layers <= kMostLayers, where, ": has ", shape.layers, " layers, expected at most ",
                 kMostLayers, ".");
  HALFSTEP_CHECK(shape.head_size > 0 || shape.width % shape.heads == 0, where, ": the width ", shape.width,
                 " is not divisible by its ", shape.heads, " heads, and head_dim is not given.");
  if (shape.head_size == 0) shape.head_size = shape.width / shape.heads;
  HALFSTEP_CHECK(shape.heads % shape.key_value_heads == 0, where, ": ", shape.heads,
                 " heads are not divisible by ", shape.key_value_heads, " heads of keys and values.");
  HALFSTEP_CHECK(shape.query_width() <= kLargestSize, where, ": ", shape.heads, " heads of ", shape.head_size,
                 " elements are more than ", kLargestSize, " together.");
  shape.name = where;
  return shape;
}

}  // namespace halfstep::forecast
