#include "forecast/shape.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>

#include "forecast/shapes.h"

namespace halfstep::forecast {
namespace {

// The counts that the models' pages on huggingface.co show.
TEST(Shape, KnownModelsHaveThePublishedNumberOfParameters) {
  EXPECT_EQ(known("gpt2-124m").parameters(), 124'439'808);
  EXPECT_EQ(known("gpt2-1.5b").parameters(), 1'557'611'200);
  EXPECT_EQ(known("smollm2-135m").parameters(), 134'515'008);
  EXPECT_EQ(known("llama-1b").parameters(), 1'235'814'400);
  EXPECT_EQ(known("llama-8b").parameters(), 8'030'261'248);
  EXPECT_EQ(known("llama-70b").parameters(), 70'553'706'496);
  EXPECT_EQ(known("llama-405b").parameters(), 405'853'388'800);
  EXPECT_EQ(known("mistral-7b").parameters(), 7'241'732'096);
  EXPECT_EQ(known("qwen3-8b").parameters(), 8'190'735'360);
}

TEST(Shape, Qwen2HasBiasesOfQueriesKeysAndValuesOnly) {
  // Qwen2.5-0.5B: 494,032,768 on its page.
  const ModelShape shape = read_shape(
      R"({"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "hidden_size": 896,
          "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
          "num_key_value_heads": 2, "tie_word_embeddings": true})",
      "config.json");
  EXPECT_EQ(shape.parameters(), 494'032'768);
}

TEST(Shape, ArithmeticPerTokenIsSixForEachMultipliedWeight) {
  const ModelShape shape = known("gpt2-124m");
  // All parameters but positions, biases and norms; attention's two products over half of 1,024 tokens.
  const double weights = 12 * 12.0 * 768 * 768 + 50257.0 * 768;
  EXPECT_DOUBLE_EQ(shape.flops_per_token(1024), 6 * (weights + 12.0 * 768 * 1024));
}

TEST(Shape, AFamilyThatIsNotKnownIsRefusedByName) {
  try {
    read_shape(R"({"model_type": "mamba", "hidden_size": 8})", "config.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'mamba'"), std::string::npos) << error.what();
  }
}

TEST(Shape, ASizeThatIsMissingIsNotGuessed) {
  EXPECT_THROW(read_shape(R"({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1})", "x"), Error);
  EXPECT_THROW(read_shape(R"({"model_type": "gpt2", "vocab_size": 5, "n_positions": 8, "n_embd": 9,
                              "n_layer": 1, "n_head": 2})",
                          "x"),
               Error);
}

}  // namespace
}  // namespace halfstep::forecast
