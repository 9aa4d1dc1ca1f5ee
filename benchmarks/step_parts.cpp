// What a BF16 step of a model of SmolLM2's shape is made of: type conversions by the operation that makes
// them, and the share of its matrix products, timed alone at the same shapes, types and layouts, in turns
// with whole steps.
//
//   step_parts [--layers N] [--batch N] [--length N] [--vocabulary N] [--threads N] [--rounds N] [--json]
//
// Products inside fused operations, such as attention, are not among the bare ones.
#include <ATen/record_function.h>
#include <halfstep/models.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program.h"
#include "support/statistics.h"

namespace {

using at::Tensor;
using Json = nlohmann::ordered_json;

bool is_product(const std::string& op) {
  return op == "aten::mm" || op == "aten::addmm" || op == "aten::bmm" || op == "halfstep::product";
}

/// Operations that only pass a conversion on.
bool is_conversion(const std::string& op) {
  return op == "aten::to" || op == "aten::_to_copy" || op == "aten::_autocast_to_reduced_precision" ||
         op == "aten::contiguous" || op == "aten::clone";
}

/// One product, and operands like its own.
struct Product {
  std::string op;
  std::vector<Tensor> operands;

  void run() const {
    if (op == "halfstep::product") {
      static const auto product =
          c10::Dispatcher::singleton()
              .findSchemaOrThrow("halfstep::product", "")
              .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>();
      product.call(operands[0], operands[1], operands.size() > 2 ? std::optional(operands[2]) : std::nullopt);
    } else if (op == "aten::mm") {
      at::mm(operands[0], operands[1]);
    } else if (op == "aten::bmm") {
      at::bmm(operands[0], operands[1]);
    } else {
      at::addmm(operands[0], operands[1], operands[2]);
    }
  }
};

Tensor in_the_layout_of(const Tensor& tensor) {
  int64_t elements = tensor.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; elements > 0 && i < tensor.dim(); ++i)
    elements += (tensor.size(i) - 1) * tensor.stride(i);
  return at::full({elements}, 0.5, tensor.options()).as_strided(tensor.sizes(), tensor.strides());
}

/// What a step called, in order.
struct Recording {
  std::vector<std::string> open;
  std::map<std::string, int> conversions;  // by the operation around them
  std::vector<Product> products;

  void enter(const at::RecordFunction& function) {
    const std::string name = function.name();
    if (name == "aten::_to_copy") {
      const auto around =
          std::find_if(open.rbegin(), open.rend(), [](const std::string& op) { return !is_conversion(op); });
      ++conversions[around == open.rend() ? "the step itself" : *around];
    }
    if (is_product(name)) {
      Product product{name, {}};
      for (const c10::IValue& input : function.inputs())
        if (input.isTensor()) product.operands.push_back(input.toTensor());
      products.push_back(std::move(product));
    }
    open.push_back(name);
  }
  void leave() { open.pop_back(); }

  /// Operands of their own, in the same layouts: those of the step are not kept alive.
  void detach_operands() {
    for (Product& product : products)
      for (Tensor& operand : product.operands) operand = in_the_layout_of(operand);
  }
};

Recording* recording = nullptr;

template <typename Step>
Recording recorded(Step step) {
  Recording made;
  recording = &made;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            const at::NoGradGuard no_grad;
            recording->enter(function);
            return nullptr;
          },
          [](const at::RecordFunction&, at::ObserverContext*) { recording->leave(); })
          .needsInputs(true));
  step();
  at::removeCallback(handle);
  recording = nullptr;
  made.detach_operands();
  return made;
}

double milliseconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

int run(int argc, char** argv) {
  CLI::App app("What a step is made of.");
  int64_t layers = 2, batch = 4, length = 256, vocabulary = 2048;
  int threads = 1, rounds = 15;
  bool as_json = false;
  app.add_option("--layers", layers)->check(CLI::PositiveNumber);
  app.add_option("--batch", batch)->check(CLI::PositiveNumber);
  app.add_option("--length", length)->check(CLI::PositiveNumber);
  app.add_option("--vocabulary", vocabulary)->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds, "of steps and of products, in turns")->check(CLI::PositiveNumber);
  app.add_flag("--json", as_json, "JSON on the standard output");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);

  halfstep::Llama model(halfstep::LlamaConfig{.vocab_size = vocabulary,
                                              .hidden_size = 576,
                                              .intermediate_size = 1536,
                                              .num_hidden_layers = layers,
                                              .num_attention_heads = 9,
                                              .num_key_value_heads = 3,
                                              .max_position_embeddings = length,
                                              .tie_word_embeddings = true},
                        /*seed=*/1);
  halfstep::TrainStep step(halfstep::Precision::bf16(), *model, halfstep::AdamWOptions{.lr = 1e-4},
                           {.max_grad_norm = 1, .precision = {.autocast = {.allow_emulated = true}}});
  at::manual_seed(1);
  const Tensor ids = at::randint(vocabulary, {batch, length + 1});
  const auto one_step = [&] {
    (void)step([&] { return model->loss(ids.narrow(1, 0, length), ids.narrow(1, 1, length)); });
  };
  one_step();  // makes moments and masters
  const Recording found = recorded(one_step);
  const auto bare_products = [&] {
    const at::NoGradGuard no_grad;
    for (const Product& product : found.products) product.run();
  };
  bare_products();

  std::vector<double> steps, products, shares;
  for (int round = 0; round < rounds; ++round) {
    steps.push_back(milliseconds_of(one_step));
    products.push_back(milliseconds_of(bare_products));
    shares.push_back(products.back() / steps.back());
  }
  std::sort(shares.begin(), shares.end());
  const double low = shares[shares.size() / 4], high = shares[shares.size() * 3 / 4];

  std::vector<std::pair<std::string, int>> conversions(found.conversions.begin(), found.conversions.end());
  std::stable_sort(conversions.begin(), conversions.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  int all = 0;
  for (const auto& [op, count] : conversions) all += count;
  if (as_json) {
    Json json{{"threads", threads},
              {"layers", layers},
              {"tokens", batch * length},
              {"vocabulary", vocabulary},
              {"step_milliseconds", bench::median(steps)},
              {"bare_products_milliseconds", bench::median(products)},
              {"bare_products", found.products.size()},
              {"share_of_bare_products", {low, bench::median(shares), high}},
              {"conversions", all}};
    for (const auto& [op, count] : conversions) json["conversions_by_operation"][op] = count;
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  std::printf("step %.1f ms, its %zu matrix products alone %.1f ms: %.2f of the step (%.2f to %.2f)\n",
              bench::median(steps), found.products.size(), bench::median(products), bench::median(shares),
              low, high);
  std::printf("%d conversions, by the operation around them:\n", all);
  for (const auto& [op, count] : conversions) std::printf("%8d  %s\n", count, op.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
