// shadow_check: whether shadow mode ranks layers as dropping each of them to the precision does.
//
//   shadow_check [--json] [--precisions NAMES] [--layers N] [--width N] [--steps N] [--batches N] [--seed N]
//                [--floor R]
//
// A small GPT-2 is trained in FP32 on tinyshakespeare with a Shadow beside it. Then, with the weights that it
// ended with, each linear layer alone takes the recipe, all others stay in BF16 (precision.keep_high), and
// the gradient of the whole model is compared with that of BF16 everywhere, over the same batches: the norm
// of the difference as a share of the gradient's. That needs a forward and a backward for each layer and
// batch; the shadow needed one run. Both orders of the layers are compared by Spearman's rank correlation.
// Exits with 1 when the correlation of a precision is below R, 0 by default.
#include <halfstep/memory.h>
#include <halfstep/models.h>
#include <halfstep/shadow.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "report/shadow.h"
#include "support/program.h"
#include "support/text.h"

namespace bench {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::vector<std::string> precisions{"fp8-delayed", "fp8-current", "mxfp8", "nvfp4"};
  int layers = 4, width = 64, steps = 100, batches = 8;
  uint64_t seed = 1;
  double floor = 0;
  bool as_json = false;
};

constexpr int64_t kSequences = 8, kLength = 64;

halfstep::Precision precision_named(const std::string& name) {
  if (name == "fp8-delayed") return halfstep::Precision::fp8_delayed();
  if (name == "fp8-current") return halfstep::Precision::fp8_current();
  if (name == "fp8-rowwise") return halfstep::Precision::fp8_rowwise();
  if (name == "fp8-block") return halfstep::Precision::fp8_block();
  if (name == "mxfp8") return halfstep::Precision::mxfp8();
  HALFSTEP_CHECK(name == "nvfp4", name, " is no recipe.");
  return halfstep::Precision::nvfp4();
}

halfstep::Gpt2 fresh_model(const Options& options) {
  return halfstep::Gpt2(halfstep::Gpt2Config{.vocab_size = 256,
                                             .n_positions = kLength,
                                             .n_embd = options.width,
                                             .n_layer = options.layers,
                                             .n_head = 4,
                                             .resid_pdrop = 0,
                                             .embd_pdrop = 0,
                                             .attn_pdrop = 0},
                        options.seed);
}

void copy_weights(torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto source = from.parameters();
  auto target = to.parameters();
  for (size_t i = 0; i < source.size(); ++i) target[i].copy_(source[i]);
}

/// The whole gradient of every batch, with the weights of `trained`.
std::vector<torch::Tensor> gradients_of(const Options& options, const halfstep::Precision& precision,
                                        halfstep::Gpt2& trained, const std::vector<Batch>& batches) {
  halfstep::Gpt2 model = fresh_model(options);
  copy_weights(*trained, *model);
  halfstep::MixedPrecision mp(precision, *model, {.autocast = {.allow_emulated = true}});
  std::vector<torch::Tensor> gradients;
  for (const Batch& batch : batches) {
    mp.backward(mp.forward([&] { return model->loss(batch.tokens, batch.targets); }));
    std::vector<torch::Tensor> parts;
    for (const halfstep::Param& param : mp.params())
      parts.push_back(param.working.grad().to(torch::kDouble).reshape({-1}));
    gradients.push_back(torch::cat(parts));
    mp.advance(mp.inspect_grads());
    mp.zero_grad();
  }
  return gradients;
}

/// 1 is the least; equal ones share the mean of their places.
std::vector<double> ranks_of(const std::vector<double>& values) {
  std::vector<double> ranks;
  for (const double value : values) {
    double below = 0, equal = 0;
    for (const double other : values) below += other < value, equal += other == value;
    ranks.push_back(below + (equal + 1) / 2);
  }
  return ranks;
}

double spearman(const std::vector<double>& one, const std::vector<double>& other) {
  const auto a = ranks_of(one), b = ranks_of(other);
  const double mean = static_cast<double>(a.size() + 1) / 2;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) * (a[i] - mean);
    bb += (b[i] - mean) * (b[i] - mean);
  }
  return ab / std::sqrt(aa * bb);
}

int run(int argc, char** argv) {
  CLI::App app("Whether shadow mode ranks layers as dropping each of them to the precision does");
  Options options;
  app.add_option("--precisions", options.precisions, "Recipes, with commas")->delimiter(',');
  app.add_option("--layers", options.layers, "Blocks of the model")->check(CLI::Range(1, 48));
  app.add_option("--width", options.width, "A multiple of 16")->check(CLI::Range(16, 4096));
  app.add_option("--steps", options.steps, "To train")->check(CLI::Range(10, 100000));
  app.add_option("--batches", options.batches, "To measure each layer with")->check(CLI::Range(1, 1000));
  app.add_option("--seed", options.seed, "Of weights and batches");
  app.add_option("--floor", options.floor, "The least correlation")->check(CLI::Range(-1.0, 1.0));
  app.add_flag("--json", options.as_json, "The figures as JSON");
  CLI11_PARSE(app, argc, argv);
  halfstep::install_cpu_allocator();

  const torch::Tensor text = tiny_shakespeare();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  halfstep::Gpt2 model = fresh_model(options);
  halfstep::RunHistory history;
  {
    halfstep::TrainStep step(halfstep::Precision::fp32(), *model, halfstep::AdamWOptions{.lr = 1e-3});
    halfstep::ShadowOptions shadow_options{.every = std::max(1, options.steps / 10)};
    for (const std::string& name : options.precisions)
      shadow_options.precisions.push_back({.name = name, .precision = precision_named(name)});
    halfstep::Shadow shadow(step.mixed_precision(), shadow_options);
    for (int number = 1; number <= options.steps; ++number) {
      const Batch batch = random_batch(text, kSequences, kLength, generator);
      (void)step([&] { return model->loss(batch.tokens, batch.targets); });
      for (halfstep::ShadowRecord& record : shadow.take()) history.shadows.push_back(std::move(record));
    }
  }
  const halfstep::ShadowFindings findings = halfstep::shadow_findings(history);
  std::vector<Batch> batches;
  for (int i = 0; i < options.batches; ++i)
    batches.push_back(random_batch(text, kSequences, kLength, generator));
  const auto reference = gradients_of(options, halfstep::Precision::bf16(), model, batches);

  ordered_json answer;
  bool good = true;
  for (size_t i = 0; i < findings.precisions.size(); ++i) {
    const std::string& name = findings.precisions[i];
    std::vector<double> measured, effects, worst_errors;
    ordered_json rows = ordered_json::array();
    for (const halfstep::ShadowLayer& layer : findings.layers) {
      if (!layer.cells[i]) continue;
      const auto changed =
          gradients_of(options, precision_named(name).quantise(layer.name).keep_high("*"), model, batches);
      double squares = 0;
      for (size_t batch = 0; batch < batches.size(); ++batch) {
        const torch::Tensor exact = reference[batch];
        const double change = ((changed[batch] - exact).norm() / exact.norm()).item<double>();
        squares += change * change;
      }
      measured.push_back(std::sqrt(squares / static_cast<double>(batches.size())));
      effects.push_back(layer.cells[i]->effect);
      worst_errors.push_back(layer.cells[i]->worst_error());
      rows.push_back(
          {{"layer", layer.name}, {"gradient_change", measured.back()}, {"effect", effects.back()}});
    }
    const double correlation = spearman(effects, measured);
    good = good && correlation >= options.floor;
    answer[name] = {{"rank_correlation", correlation},
                    {"rank_correlation_of_worst_error", spearman(worst_errors, measured)},
                    {"layers", rows}};
    if (options.as_json) continue;
    std::cout << name << ": rank correlation " << correlation << " over " << rows.size()
              << " layers; by the largest error alone " << answer[name]["rank_correlation_of_worst_error"]
              << "\n";
  }
  if (options.as_json) std::cout << answer.dump(1) << "\n";
  return good ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::exit_code_of(bench::run, argc, argv); }
