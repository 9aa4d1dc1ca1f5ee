// model_parity [--bf16] [--no-grads] CASE...: what Halfstep's models compute, for tools/parity_transformers.
//
// A case is a folder with `hf` (config.json and weights) and `ids.safetensors` (ids and targets). Beside them
// are written `ours.safetensors` (logits, loss, a gradient for every parameter under "grad." and its name)
// and the folder `saved`, by save_pretrained.
#include <halfstep/autocast.h>
#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/models.h>
#include <halfstep/tensor_file.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "support/any_machine.h"

namespace {

using Path = std::filesystem::path;

at::Tensor named(const halfstep::NamedTensors& tensors, const std::string& name) {
  for (const auto& [key, tensor] : tensors)
    if (key == name) return tensor;
  throw halfstep::Error("ids.safetensors has no '" + name + "'");
}

struct Asked {
  bool bf16 = false;  ///< the loss in BF16 too, by AutocastScope over FP32 weights and by MixedPrecision
  bool grads = true;  ///< logits, gradients and a saved folder; else the loss alone
};

void run(const Path& folder, const Asked& asked) {
  const auto model = halfstep::load_pretrained(folder / "hf");
  model->eval();
  const auto given = halfstep::read_tensors(folder / "ids.safetensors");
  const at::Tensor ids = named(given, "ids"), targets = named(given, "targets");
  halfstep::NamedTensors results;
  if (asked.grads) {
    const at::Tensor loss = model->loss(ids, targets);
    loss.backward();
    results.emplace_back("loss", loss.detach());
    for (const auto& item : model->named_parameters())
      results.emplace_back("grad." + item.key(), item.value().grad());
    halfstep::save_pretrained(*model, folder / "saved");
  }
  const torch::NoGradGuard no_grad;
  if (asked.grads)
    results.emplace_back("logits", model->forward(ids));
  else
    results.emplace_back("loss", model->loss(ids, targets));
  if (asked.bf16) {
    {
      const halfstep::AutocastScope scope(at::kBFloat16, halfstep::OpPolicy::standard(),
                                          halfstep::testing::kAnyMachine);
      results.emplace_back("loss_autocast_bf16", model->loss(ids, targets));
    }
    const halfstep::MixedPrecision mp(halfstep::Precision::bf16(), *model,
                                      {.autocast = halfstep::testing::kAnyMachine});
    results.emplace_back("loss_mixed_bf16", mp.forward([&] { return model->loss(ids, targets); }));
  }
  halfstep::write_tensors(folder / "ours.safetensors", results);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Logits, loss and gradients of Halfstep's models, for tools/parity_transformers.");
  std::vector<std::string> cases;
  Asked asked;
  bool no_grads = false;
  app.add_option("cases", cases, "folders")->required();
  app.add_flag("--bf16", asked.bf16, "the loss in BF16 too");
  app.add_flag("--no-grads", no_grads, "the loss alone");
  CLI11_PARSE(app, argc, argv);
  asked.grads = !no_grads;
  try {
    for (const std::string& folder : cases) run(folder, asked);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
