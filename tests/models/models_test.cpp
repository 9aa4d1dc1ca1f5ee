// What the modules are beside what they compute, which tools/parity_transformers asks transformers.
#include <gtest/gtest.h>
#include <halfstep/models.h>
#include <torch/torch.h>

#include <sstream>

#include "models/tiny.h"
#include "support/error_of.h"
#include "support/scratch.h"

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

const CausalLMSizes kTinySizes{.vocabulary = 61, .context = 32, .layers = 2, .width = 32, .heads = 4};

/// As the Error about an unknown one lists them.
std::vector<std::string> all_families() {
  const std::string said = error_of([] { (void)config_json_of("none", kTinySizes); });
  const std::string before = "Halfstep has: ";
  std::vector<std::string> families;
  std::istringstream names(said.substr(said.find(before) + before.size()));
  for (std::string name; names >> name;) families.push_back(name.substr(0, name.size() - 1));
  return families;
}

TEST(Models, AHolderAppliesListsSavesAndLoadsAsLibTorchsOwnDo) {
  Llama model(tiny_llama(), 1), other(tiny_llama(), 2);
  size_t visited = 0;
  model->apply([&](torch::nn::Module&) { ++visited; });
  EXPECT_EQ(visited, model->modules().size());
  EXPECT_EQ(model->modules().front().get(), model.get());
  std::stringstream file;
  torch::save(model, file);
  torch::load(other, file);
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), other->named_parameters()[item.key()])) << item.key();
  EXPECT_TRUE(at::equal(model(some_ids()), other(some_ids())));
  ResNet18 images(ResNet18Options{.classes = 3, .channels = 1, .small_images = true}, 1);
  std::stringstream images_file;
  torch::save(images, images_file);
  EXPECT_NO_THROW(torch::load(images, images_file));
}

class EveryFamily : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryFamily, IsMadeFromSizesAndTellsThemInItsShape) {
  const auto model = make_causal_lm(config_json_of(GetParam(), kTinySizes), 1);
  const CausalLMShape shape = model->shape();
  EXPECT_EQ(shape.family, GetParam());
  EXPECT_EQ(shape.vocabulary, 61);
  EXPECT_EQ(shape.context, 32);
  EXPECT_EQ(shape.layers, 2);
  EXPECT_EQ(shape.width, 32);
  EXPECT_EQ(shape.heads, 4);
  EXPECT_EQ(shape.key_value_heads, 4);
  EXPECT_EQ(shape.head_size, 8);
  EXPECT_EQ(model->forward(some_ids()).sizes(), at::IntArrayRef({2, 16, 61}));
}

TEST_P(EveryFamily, IsSavedAndLoadedAndSavedTheSame) {
  const ScratchFolder folder;
  const auto model = make_causal_lm(config_json_of(GetParam(), kTinySizes), 1);
  save_pretrained(*model, folder.path());
  const auto loaded = load_pretrained(folder.path());
  EXPECT_EQ(loaded->config_json(), model->config_json());
  EXPECT_EQ(names_of(*loaded), names_of(*model));
  EXPECT_TRUE(at::equal(loaded->forward(some_ids()), model->forward(some_ids())));
  model->apply([](torch::nn::Module& module) { module.eval(); });
  std::stringstream file;
  torch::save(std::static_pointer_cast<torch::nn::Module>(model), file);
  EXPECT_GT(file.str().size(), 10'000u);
}

TEST_P(EveryFamily, DrawsItsWeightsFromTheSeedAlone) {
  const std::string config = config_json_of(GetParam(), kTinySizes);
  const auto model = make_causal_lm(config, 9), same = make_causal_lm(config, 9);
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), same->named_parameters()[item.key()])) << item.key();
    EXPECT_TRUE(item.value().isfinite().all().item<bool>()) << item.key();
  }
}

TEST_P(EveryFamily, RefusesSizesThatDoNotFit) {
  for (int64_t CausalLMSizes::* size :
       {&CausalLMSizes::vocabulary, &CausalLMSizes::context, &CausalLMSizes::layers, &CausalLMSizes::width,
        &CausalLMSizes::heads}) {
    CausalLMSizes sizes = kTinySizes;
    sizes.*size = 0;
    EXPECT_NE(error_of([&] { (void)config_json_of(GetParam(), sizes); }).find("a size is 0"),
              std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EveryFamily, ::testing::ValuesIn(all_families()),
                         [](const auto& info) { return info.param; });

// Counted by hand: every token meets each weight of a product once, forward; backward takes twice as much.
TEST(Models, OperationsPerTokenAreSixPerWeightAndAttentionOverHalfTheSequence) {
  const int64_t width = 32, layers = 2, length = 16, vocabulary = 61;
  const int64_t attention = layers * width * length;
  const Gpt2 gpt2(tiny_gpt2(), 1);
  EXPECT_EQ(gpt2->flops_per_token(length),
            6.0 * static_cast<double>(vocabulary * width + layers * 12 * width * width + attention));
  const Llama llama(tiny_llama(), 1);  // half as many heads of keys and values; a free head
  EXPECT_EQ(llama->flops_per_token(length),
            6.0 * static_cast<double>(vocabulary * width + layers * (3 * width * width + 3 * width * 48) +
                                      attention));
}

TEST(Models, ATiedHeadIsOneParameterListedOnce) {
  auto config = tiny_gpt2();
  const auto count = [](const torch::nn::Module& model) { return model.parameters().size(); };
  config.tie_word_embeddings = true;
  const Gpt2 tied(config, 1);
  config.tie_word_embeddings = false;
  const Gpt2 free(config, 1);
  EXPECT_EQ(count(*free), count(*tied) + 1);
  EXPECT_EQ(free->named_parameters()["lm_head.weight"].sizes(),
            tied->named_parameters()["transformer.wte.weight"].sizes());
}

TEST(Models, ATiedHeadsGradientIsTheSumOfBothUses) {
  auto config = tiny_llama();
  config.tie_word_embeddings = true;
  Llama tied(config, 3);
  config.tie_word_embeddings = false;
  Llama free(config, 3);
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : tied->named_parameters()) free->named_parameters()[item.key()].copy_(item.value());
    free->named_parameters()["lm_head.weight"].copy_(tied->named_parameters()["model.embed_tokens.weight"]);
  }
  tied->loss(some_ids(), some_ids()).backward();
  free->loss(some_ids(), some_ids()).backward();
  const at::Tensor both = free->named_parameters()["lm_head.weight"].grad() +
                          free->named_parameters()["model.embed_tokens.weight"].grad();
  // One addition, in either order.
  EXPECT_TRUE(at::equal(tied->named_parameters()["model.embed_tokens.weight"].grad(), both));
}

TEST(Models, TheSameSeedGivesTheSameWeightsAndLeavesLibTorchsGeneratorAlone) {
  torch::manual_seed(5);
  const at::Tensor expected = at::rand({3});
  torch::manual_seed(5);
  const Llama a(tiny_llama(), 9), b(tiny_llama(), 9), c(tiny_llama(), 10);
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
  const auto first = a->named_parameters(), second = b->named_parameters(), other = c->named_parameters();
  for (const auto& item : first) EXPECT_TRUE(at::equal(item.value(), second[item.key()])) << item.key();
  EXPECT_FALSE(at::equal(first["model.norm.weight"], at::zeros({32})));
  EXPECT_FALSE(at::equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"]));
}

TEST(Models, Gpt2StartsAsItsPaperSays) {
  auto config = tiny_gpt2();
  config.n_embd = 256;
  const Gpt2 model(config, 1);
  const auto parameters = model->named_parameters();
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
  const std::shared_ptr<CausalLM> models[] = {std::make_shared<Gpt2Impl>(gpt2, 1),
                                              std::make_shared<LlamaImpl>(tiny_llama(), 1)};
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
    EXPECT_FALSE(at::allclose(dropping->forward(some_ids()), plain->forward(some_ids())));
    dropping->eval();
    EXPECT_TRUE(at::equal(dropping->forward(some_ids()), plain->forward(some_ids())));
  }
  auto config = tiny_llama();
  Llama plain(config, 1);
  config.attention_dropout = 0.5;
  Llama dropping(config, 1);
  EXPECT_FALSE(at::allclose(dropping->forward(some_ids()), plain->forward(some_ids())));
  dropping->eval();
  EXPECT_TRUE(at::allclose(dropping->forward(some_ids()), plain->forward(some_ids())));
}

TEST(Models, NoPositionSeesALaterOne) {
  const std::shared_ptr<CausalLM> models[] = {std::make_shared<Gpt2Impl>(tiny_gpt2(), 1),
                                              std::make_shared<LlamaImpl>(tiny_llama(), 1)};
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

TEST(Models, ALongRowOfShortTextsFitsIntoGpt2) {
  Gpt2 model(tiny_gpt2(), 1);  // 32 positions
  const at::Tensor ids = at::randint(61, {1, 40}, at::kLong);
  at::Tensor documents = at::zeros_like(ids);
  documents.narrow(1, 25, 15).fill_(1);
  EXPECT_TRUE(at::allclose(model->forward_packed(ids, documents).narrow(1, 25, 15),
                           model->forward(ids.narrow(1, 25, 15)), /*rtol=*/1e-4, /*atol=*/1e-5));
  documents.narrow(1, 0, 33).fill_(0);
  EXPECT_NE(error_of([&] { (void)model->forward_packed(ids, documents); }).find("33 ids in a text"),
            std::string::npos);
}

TEST(Models, IdsThatDoNotFitAreRefusedWithTheirShape) {
  Gpt2 model(tiny_gpt2(), 1);
  EXPECT_NE(error_of([&] { (void)model->forward(at::zeros({2, 33}, at::kLong)); }).find("33 ids in a text"),
            std::string::npos);
  EXPECT_NE(error_of([&] { (void)model->forward(at::zeros({2, 3})); }).find("expected Long"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              (void)model->loss(some_ids(), some_ids().narrow(1, 1, 15));
            }).find("each id has one target"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep::testing
