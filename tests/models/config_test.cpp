// config.json comes from strangers: what is not understood is refused by name.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <halfstep/models.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "models/tiny.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep::testing {
namespace {

using nlohmann::json;

json config_of(const CausalLM& model) { return json::parse(model.config_json()); }

/// What load_pretrained says of a folder with this config.json and the weights of `model`.
std::string refusal(const CausalLM& model, const json& config) {
  const ScratchFolder folder;
  save_pretrained(model, folder.path());
  std::ofstream(folder / "config.json") << config;
  return error_of([&] { (void)load_pretrained(folder.path()); });
}

struct Change {
  const char* field;
  json value;
  const char* said;
};

class Refused : public ::testing::Test {
 protected:
  static void expect_each(const CausalLM& model, const std::vector<Change>& changes) {
    EXPECT_EQ(refusal(model, config_of(model)), "no error");
    for (const Change& change : changes) {
      json config = config_of(model);
      config[change.field] = change.value;
      const std::string said = refusal(model, config);
      EXPECT_NE(said.find(change.said), std::string::npos) << change.field << ": " << said;
    }
  }
};

TEST_F(Refused, WhatGpt2DoesNotImplementByItsName) {
  expect_each(*Gpt2(tiny_gpt2(), 1),
              {
                  {"model_type", "bert", "Halfstep has: gpt2, llama"},
                  {"activation_function", "quick_gelu", "'quick_gelu' is not implemented"},
                  {"add_cross_attention", true, "cross-attention is not implemented"},
                  {"quantization_config", {{"bits", 4}}, "quantised weights are not implemented"},
                  {"hidden_size", 32, "n_embd"},
                  {"n_embd", "32", "expected a whole number"},
                  {"n_embd", 32.5, "expected a whole number"},
                  {"n_embd", 0, "expected 1 to"},
                  {"n_embd", -32, "expected 1 to"},
                  {"n_embd", 9223372036854775807LL, "expected 1 to"},
                  {"n_embd", 18446744073709551615ULL, "expected 1 to"},
                  {"n_layer", 1000000, "n_layer is 1000000"},
                  {"n_head", 5, "not divisible by n_head 5"},
                  {"layer_norm_epsilon", -1e-5, "not negative"},
                  {"resid_pdrop", 1.0, "expected 0 up to below 1"},
                  {"scale_attn_weights", 1, "expected true or false"},
              });
}

TEST_F(Refused, WhatLlamaDoesNotImplementByItsName) {
  expect_each(*Llama(tiny_llama(), 1),
              {
                  {"hidden_act", "relu2", "'relu2' is not implemented"},
                  {"pad_token_id", 18446744073709551615ULL, "expected a token's number"},
                  {"pad_token_id", 0.5, "expected a token's number"},
                  {"pad_token_id", 61, "outside the vocabulary of 61"},
                  {"rope_parameters",
                   {{"rope_type", "yarn"}, {"factor", 4.0}},
                   "rope_type 'yarn' is not implemented"},
                  {"rope_scaling", {{"type", "dynamic"}, {"factor", 4.0}}, "disagree"},
                  {"rope_parameters", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor: is 0.5"},
                  {"rope_parameters",
                   {{"full_attention", {{"rope_theta", 1.0}}}, {"rope_theta", {1}}},
                   "expected a number"},
                  {"rope_parameters", 7, "expected an object"},
                  {"num_key_value_heads", 3, "not divisible by num_key_value_heads 3"},
                  {"head_dim", 7, "expected an even number"},
                  {"head_dim", 134217728, "heads of 134217728 elements"},
                  {"attention_dropout", 1.5, "attention_dropout is 1.5"},
              });
}

const CausalLMSizes kSmall{.vocabulary = 61, .context = 32, .layers = 2, .width = 32, .heads = 4};

TEST_F(Refused, WindowsOfRelativesThatDoNotFitTheirLayers) {
  expect_each(*make_causal_lm(config_json_of("qwen2", kSmall), 1),
              {
                  {"layer_types", json::array({"full_attention"}), "1 elements for 2 layers"},
                  {"layer_types", json::array({"full_attention", "sliding_attention"}), "give no window"},
                  {"layer_types", json::array({"full_attention", "linear"}), "full_attention or sliding"},
                  {"max_window_layers", -1, "a number of layers"},
                  {"sliding_window", 0, "expected 1 to"},
                  {"num_hidden_layers", 1000000, "num_hidden_layers is 1000000"},
                  {"rope_parameters", {{"rope_type", "yarn"}}, "rope_type 'yarn' is not implemented"},
              });
  expect_each(
      *make_causal_lm(config_json_of("mistral", kSmall), 1),
      {
          {"layer_types", json::array({"full_attention", "full_attention"}), "layers of several kinds"},
          {"sliding_window", "wide", "expected a whole number"},
          {"num_hidden_layers", 1000000, "num_hidden_layers is 1000000"},
      });
}

TEST(Config, AWindowBoundsWhatAPositionSees) {
  CausalLMSizes one_layer = kSmall;
  one_layer.layers = 1;
  json config = json::parse(config_json_of("mistral", one_layer));
  config["sliding_window"] = 3;
  const auto model = make_causal_lm(config.dump(), 1);
  const at::NoGradGuard no_grad;
  at::Tensor ids = at::arange(16, at::kLong).unsqueeze(0);
  const at::Tensor before = model->forward(ids);
  ids.select(1, 5).fill_(40);
  const at::Tensor after = model->forward(ids);
  for (int64_t position = 0; position < 16; ++position)
    EXPECT_EQ(at::equal(before.select(1, position), after.select(1, position)), position < 5 || position > 7)
        << position;
}

TEST(Config, RopeOfTransformersFourAndFiveAreReadAlike) {
  LlamaConfig config = tiny_llama();
  config.rope = {
      .rope_type = "llama3", .rope_theta = 5e5, .factor = 8, .original_max_position_embeddings = 16};
  const Llama model(config, 1);
  json five = config_of(*model), four = five;
  five.erase("rope_theta");
  five.erase("rope_scaling");
  four.erase("rope_parameters");
  four["rope_scaling"].erase("rope_theta");
  const ScratchFolder folder;
  for (const json& spelling : {four, five}) {
    save_pretrained(*model, folder.path());
    std::ofstream(folder / "config.json") << spelling;
    const auto loaded = std::dynamic_pointer_cast<LlamaImpl>(load_pretrained(folder.path()));
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->config().rope.rope_type, "llama3");
    EXPECT_EQ(loaded->config().rope.rope_theta, 5e5);
    EXPECT_EQ(loaded->config().rope.factor, 8);
    EXPECT_EQ(loaded->config().rope.original_max_position_embeddings, 16);
  }
}

TEST(Config, FieldsThatTheModelDoesNotReadAreWrittenAgain) {
  const ScratchFolder folder, again;
  const Llama model(tiny_llama(), 1);
  save_pretrained(*model, folder.path());
  json config = config_of(*model);
  config["eos_token_id"] = {128001, 128009};
  config["pretraining_tp"] = 1;
  std::ofstream(folder / "config.json") << config;
  save_pretrained(*load_pretrained(folder.path()), again.path());
  json written;
  std::ifstream(again / "config.json") >> written;
  EXPECT_EQ(written["eos_token_id"], config["eos_token_id"]);
  EXPECT_EQ(written["pretraining_tp"], 1);
  EXPECT_EQ(written["dtype"], "float32");
  EXPECT_EQ(written["torch_dtype"], "float32");
}

}  // namespace
}  // namespace halfstep::testing
