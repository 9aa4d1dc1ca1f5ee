// What the modules are beside what they compute, which tools/parity_transformers asks transformers.
#include <gtest/gtest.h>
#include <halfstep/models.h>
#include <torch/torch.h>

#include "models/tiny.h"
#include "support/error_of.h"

namespace halfstep::testing {
namespace {

at::Tensor some_ids() {
  return at::randint(61, {2, 16}, at::make_generator<at::CPUGeneratorImpl>(7), at::kLong);
}

std::vector<std::string> names_of(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) names.push_back(item.key());
  return names;
}

TEST(Models, ATiedHeadIsOneParameterListedOnce) {
  auto config = tiny_gpt2();
  const auto count = [](const torch::nn::Module& model) { return model.parameters().size(); };
  config.tie_word_embeddings = true;
  const Gpt2 tied(config, 1);
  config.tie_word_embeddings = false;
  const Gpt2 free(config, 1);
  EXPECT_EQ(count(free), count(tied) + 1);
  EXPECT_EQ(free.named_parameters()["lm_head.weight"].sizes(),
            tied.named_parameters()["transformer.wte.weight"].sizes());
}

TEST(Models, ATiedHeadsGradientIsTheSumOfBothUses) {
  auto config = tiny_llama();
  config.tie_word_embeddings = true;
  Llama tied(config, 3);
  config.tie_word_embeddings = false;
  Llama free(config, 3);
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : tied.named_parameters()) free.named_parameters()[item.key()].copy_(item.value());
    free.named_parameters()["lm_head.weight"].copy_(tied.named_parameters()["model.embed_tokens.weight"]);
  }
  tied.loss(some_ids(), some_ids()).backward();
  free.loss(some_ids(), some_ids()).backward();
  const at::Tensor both = free.named_parameters()["lm_head.weight"].grad() +
                          free.named_parameters()["model.embed_tokens.weight"].grad();
  // One addition, in either order.
  EXPECT_TRUE(at::equal(tied.named_parameters()["model.embed_tokens.weight"].grad(), both));
}

TEST(Models, TheSameSeedGivesTheSameWeightsAndLeavesLibTorchsGeneratorAlone) {
  torch::manual_seed(5);
  const at::Tensor expected = at::rand({3});
  torch::manual_seed(5);
  const Llama a(tiny_llama(), 9), b(tiny_llama(), 9), c(tiny_llama(), 10);
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
  const auto first = a.named_parameters(), second = b.named_parameters(), other = c.named_parameters();
  for (const auto& item : first) EXPECT_TRUE(at::equal(item.value(), second[item.key()])) << item.key();
  EXPECT_FALSE(at::equal(first["model.norm.weight"], at::zeros({32})));
  EXPECT_FALSE(at::equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"]));
}

TEST(Models, Gpt2StartsAsItsPaperSays) {
  auto config = tiny_gpt2();
  config.n_embd = 256;
  const Gpt2 model(config, 1);
  const auto parameters = model.named_parameters();
  // Standard deviation of n samples: within 4 sigma / sqrt(2 n).
  const auto expect_deviation = [&](const std::string& name, double expected) {
    const auto& p = parameters[name];
    const double found = p.std().item<double>();
    EXPECT_NEAR(found, expected, 4 * expected / std::sqrt(2.0 * static_cast<double>(p.numel()))) << name;
  };
  expect_deviation("transformer.h.0.attn.c_attn.weight", 0.02);
  expect_deviation("transformer.h.0.attn.c_proj.weight", 0.02 / 2);  // two layers: sqrt(4)
  expect_deviation("transformer.h.1.mlp.c_proj.weight", 0.02 / 2);
  expect_deviation("transformer.wpe.weight", 0.02);
  EXPECT_TRUE(at::equal(parameters["transformer.h.1.ln_2.weight"], at::ones({256})));
  EXPECT_TRUE(at::equal(parameters["transformer.h.1.mlp.c_fc.bias"], at::zeros({1024})));
}

TEST(Models, RecomputedBlocksGiveTheSameGradientsDropoutIncluded) {
  auto gpt2 = tiny_gpt2();
  gpt2.resid_pdrop = gpt2.embd_pdrop = gpt2.attn_pdrop = 0.2;
  const std::shared_ptr<CausalLM> models[] = {std::make_shared<Gpt2>(gpt2, 1),
                                              std::make_shared<Llama>(tiny_llama(), 1)};
  for (const auto& model : models) {
    std::vector<at::Tensor> kept;
    for (const bool again : {false, true}) {
      model->recompute_blocks = again;
      model->zero_grad();
      torch::manual_seed(3);
      model->loss(some_ids(), some_ids()).backward();
      const auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (again)
          EXPECT_TRUE(at::equal(parameters[i].grad(), kept[i])) << names_of(*model)[i];
        else
          kept.push_back(parameters[i].grad().clone());
      }
    }
  }
}

/// Which of the probabilities changes the logits in training, one at a time; none does in evaluation.
TEST(Models, DropoutIsHonouredInTrainingOnly) {
  for (double Gpt2Config::* probability :
       {&Gpt2Config::resid_pdrop, &Gpt2Config::embd_pdrop, &Gpt2Config::attn_pdrop}) {
    auto config = tiny_gpt2();
    Gpt2 plain(config, 1);
    config.*probability = 0.5;
    Gpt2 dropping(config, 1);
    EXPECT_FALSE(at::allclose(dropping.forward(some_ids()), plain.forward(some_ids())));
    dropping.eval();
    EXPECT_TRUE(at::equal(dropping.forward(some_ids()), plain.forward(some_ids())));
  }
  auto config = tiny_llama();
  Llama plain(config, 1);
  config.attention_dropout = 0.5;
  Llama dropping(config, 1);
  EXPECT_FALSE(at::allclose(dropping.forward(some_ids()), plain.forward(some_ids())));
  dropping.eval();
  EXPECT_TRUE(at::allclose(dropping.forward(some_ids()), plain.forward(some_ids())));
}

TEST(Models, NoPositionSeesALaterOne) {
  const std::shared_ptr<CausalLM> models[] = {std::make_shared<Gpt2>(tiny_gpt2(), 1),
                                              std::make_shared<Llama>(tiny_llama(), 1)};
  for (const auto& model : models) {
    const torch::NoGradGuard no_grad;
    at::Tensor ids = some_ids();
    const at::Tensor before = model->forward(ids);
    ids.select(1, 10).fill_(3);
    const at::Tensor after = model->forward(ids);
    EXPECT_TRUE(at::equal(before.narrow(1, 0, 10), after.narrow(1, 0, 10)));
    EXPECT_FALSE(at::equal(before.narrow(1, 10, 6), after.narrow(1, 10, 6)));
  }
}

TEST(Models, IdsThatDoNotFitAreRefusedWithTheirShape) {
  Gpt2 model(tiny_gpt2(), 1);
  EXPECT_NE(error_of([&] { (void)model.forward(at::zeros({2, 33}, at::kLong)); }).find("33 ids in a row"),
            std::string::npos);
  EXPECT_NE(error_of([&] { (void)model.forward(at::zeros({2, 3})); }).find("expected Long"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              (void)model.loss(some_ids(), some_ids().narrow(1, 1, 15));
            }).find("each id has one target"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep::testing
