// Folders in and out; what transformers makes of them is asked by tools/parity_transformers.
#include <gtest/gtest.h>
#include <halfstep/models.h>
#include <halfstep/tensor_file.h>
#include <torch/torch.h>

#include <fstream>

#include "models/tiny.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep::testing {
namespace {

using Path = std::filesystem::path;

void expect_same_weights(const CausalLM& a, const CausalLM& b) {
  const auto theirs = b.named_parameters();
  EXPECT_EQ(a.named_parameters().size(), theirs.size());
  for (const auto& item : a.named_parameters())
    EXPECT_TRUE(at::equal(item.value(), theirs[item.key()])) << item.key();
}

/// Rewrites the weights of a folder by a function over each name and tensor.
void rewrite(const Path& folder, const std::function<void(NamedTensors&)>& change) {
  auto tensors = read_tensors(folder / "model.safetensors");
  change(tensors);
  write_tensors(folder / "model.safetensors", tensors);
}

at::Tensor& named(NamedTensors& tensors, const std::string& name) {
  for (auto& [key, tensor] : tensors)
    if (key == name) return tensor;
  throw std::runtime_error("no " + name);
}

TEST(Pretrained, WhatWasSavedLoadsBitForBit) {
  const ScratchFolder folder;
  auto biased = tiny_llama();
  biased.attention_bias = biased.mlp_bias = true;
  const std::shared_ptr<CausalLM> models[] = {std::make_shared<Gpt2Impl>(tiny_gpt2(), 1),
                                              std::make_shared<LlamaImpl>(biased, 1)};
  for (const auto& model : models) {
    save_pretrained(*model, folder.path());
    const auto loaded = load_pretrained(folder.path());
    expect_same_weights(*model, *loaded);
    EXPECT_EQ(loaded->config_json(), model->config_json());
    for (const auto& parameter : loaded->parameters()) EXPECT_TRUE(parameter.requires_grad());
  }
}

TEST(Pretrained, Bf16FilesAreWidenedExactlyOrKeptAsAsked) {
  const ScratchFolder folder;
  Llama model(tiny_llama(), 1);
  model->to(at::kBFloat16);
  save_pretrained(*model, folder.path());
  const auto wide = load_pretrained(folder.path()),
             as_is = load_pretrained(folder.path(), {.type = at::kBFloat16});
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(at::equal(wide->named_parameters()[item.key()], item.value().to(at::kFloat)));
    EXPECT_TRUE(at::equal(as_is->named_parameters()[item.key()], item.value()));
  }
}

// As published files do that keep norms in F32 beside BF16 weights, whatever config.json says.
TEST(Pretrained, TensorsOfSeveralTypesAreEachWidened) {
  const ScratchFolder folder;
  const Llama model(tiny_llama(), 1);
  save_pretrained(*model, folder.path());
  rewrite(folder.path(), [](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors)
      tensor = name.ends_with("norm.weight") ? tensor : tensor.to(at::kBFloat16);
  });
  const auto loaded = load_pretrained(folder.path());
  for (const auto& item : model->named_parameters()) {
    const bool kept = item.key().ends_with("norm.weight");
    EXPECT_TRUE(at::equal(loaded->named_parameters()[item.key()],
                          kept ? item.value() : item.value().to(at::kBFloat16).to(at::kFloat)))
        << item.key();
  }
}

TEST(Pretrained, AllThatDoesNotFitIsListedAtOnce) {
  const ScratchFolder folder;
  save_pretrained(*Llama(tiny_llama(), 1), folder.path());
  rewrite(folder.path(), [](NamedTensors& tensors) {
    named(tensors, "model.norm.weight") = at::ones({31});
    named(tensors, "lm_head.weight") = at::ones({61, 32}, at::kDouble);
    std::erase_if(tensors,
                  [](const auto& item) { return item.first == "model.layers.1.mlp.up_proj.weight"; });
    tensors.emplace_back("score.weight", at::ones({2}));
  });
  const std::string said = error_of([&] { (void)load_pretrained(folder.path()); });
  for (const char* part :
       {"'model.norm.weight' is F32 of shape [31], expected F32, BF16 or F16 of shape [32]",
        "'lm_head.weight' is F64 of shape [61, 32], expected F32, BF16 or F16",
        "'model.layers.1.mlp.up_proj.weight' is missing", "'score.weight' is not a tensor of this model"})
    EXPECT_NE(said.find(part), std::string::npos) << part << "\nin: " << said;
}

TEST(Pretrained, AConfigThatAsksForMoreThanTheFileHoldsIsRefusedBeforeItGetsMemory) {
  const ScratchFolder folder;
  const Llama model(tiny_llama(), 1);
  save_pretrained(*model, folder.path());
  std::string config = model->config_json();
  const std::string size = "\"intermediate_size\": 48";
  config.replace(config.find(size), size.size(), "\"intermediate_size\": 134217728");  // 16 GiB a matrix
  std::ofstream(folder / "config.json") << config;
  const std::string said = error_of([&] { (void)load_pretrained(folder.path()); });
  EXPECT_NE(said.find("F16 of shape [134217728, 32]"), std::string::npos) << said;
}

TEST(Pretrained, AHeadBesideTheEmbeddingItIsTiedToMustBeEqual) {
  const ScratchFolder folder;
  const Gpt2 model(tiny_gpt2(), 1);
  const auto with_head = [&](const at::Tensor& head) {
    save_pretrained(*model, folder.path());
    rewrite(folder.path(), [&](NamedTensors& tensors) { tensors.emplace_back("lm_head.weight", head); });
  };
  const at::Tensor embedding = model->named_parameters()["transformer.wte.weight"].detach();
  with_head(embedding.clone());
  expect_same_weights(*model, *load_pretrained(folder.path()));
  with_head(embedding + 1);
  EXPECT_NE(
      error_of([&] { (void)load_pretrained(folder.path()); }).find("differs from 'transformer.wte.weight'"),
      std::string::npos);
}

TEST(Pretrained, ATiedHeadMayStandForTheEmbedding) {
  const ScratchFolder folder;
  const Gpt2 model(tiny_gpt2(), 1);
  save_pretrained(*model, folder.path());
  rewrite(folder.path(), [](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors)
      if (name == "transformer.wte.weight") name = "lm_head.weight";
  });
  expect_same_weights(*model, *load_pretrained(folder.path()));
}

TEST(Pretrained, PicklesAreNotOpened) {
  const ScratchFolder folder;
  save_pretrained(*Gpt2(tiny_gpt2(), 1), folder.path());
  std::filesystem::rename(folder / "model.safetensors", folder / "pytorch_model.bin");
  EXPECT_NE(error_of([&] { (void)load_pretrained(folder.path()); }).find("a pickle"), std::string::npos);
}

}  // namespace
}  // namespace halfstep::testing
