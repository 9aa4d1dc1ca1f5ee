// `halfstep explain`: which operation runs in which precision, which layers follow a recipe, and why.
#include <halfstep/autocast.h>
#include <halfstep/op_policy.h>
#include <halfstep/printable.h>
#include <halfstep/recipe.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal_text.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;
using Rows = std::vector<OpRow>;

// In the order in which a person asks: what is fast, what is safe, then the rest.
constexpr std::pair<OpRule, const char*> kHeadings[] = {
    {OpRule::Low, "LOW: inputs are cast to the scope's type, BF16 or FP16"},
    {OpRule::Fp32, "FP32: inputs are cast to FP32"},
    {OpRule::Promote, "PROMOTE: inputs are cast to the widest among them"},
    {OpRule::First, "FIRST: inputs are cast to the type of the first"},
    {OpRule::AsIs, "AS IS: inputs are left alone"},
};

bool differs_from_stock(const OpRow& row) {
  return !agrees_with_stock(row.rule, row.stock_cpu) || !agrees_with_stock(row.rule, row.stock_cuda);
}

Rows rows_to_show(bool only_differences) {
  Rows rows(op_table().begin(), op_table().end());
  if (only_differences) std::erase_if(rows, [](const OpRow& row) { return !differs_from_stock(row); });
  return rows;
}

void print_json(const Rows& rows) {
  ordered_json answer = ordered_json::array();
  for (const OpRow& row : rows)
    answer.push_back({{"op", row.op},
                      {"rule", to_string(row.rule)},
                      {"stock_cpu", to_string(row.stock_cpu)},
                      {"stock_cuda", to_string(row.stock_cuda)},
                      {"on_this_cpu",
                       {{"bf16", to_string(rule_on_this_cpu(row.op, at::kBFloat16))},
                        {"fp16", to_string(rule_on_this_cpu(row.op, at::kHalf))}}},
                      {"reason", row.reason}});
  print_answer(answer);
}

/// Those that stay in FP32 because this processor has no instructions for the scope's type.
void print_what_stays_in_fp32_here() {
  for (const auto& [low, name] : {std::pair(at::kBFloat16, "BF16"), std::pair(at::kHalf, "FP16")}) {
    std::string ops;
    int count = 0;
    for (const OpRow& row : op_table()) {
      if (rule_on_this_cpu(row.op, low) == row.rule) continue;
      ops += (ops.empty() ? "" : ", ") + std::string(row.op);
      ++count;
    }
    if (count == 0) continue;
    std::cout << "FP32 IN A " << name << " SCOPE on the CPU of this machine (" << count << " operations)\n\n";
    print_paragraph(ops, 2);
    print_paragraph(std::string("Nothing here computes them faster in ") + name +
                        ": inputs are cast to FP32, and outputs stay FP32. AutocastOptions::products_in_fp32 "
                        "overrides this.",
                    6);
    std::cout << "\n";
  }
}

// Operations that share a reason are told together, the reason once.
void print_by_reason(const Rows& rows) {
  for (const auto& [rule, heading] : kHeadings) {
    Rows of_rule;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(of_rule),
                 [&](const OpRow& row) { return row.rule == rule; });
    if (of_rule.empty()) continue;
    std::cout << heading << " (" << of_rule.size() << " operations)\n";
    while (!of_rule.empty()) {
      const std::string_view reason = of_rule.front().reason;
      std::string ops;
      for (const OpRow& row : of_rule)
        if (row.reason == reason) ops += (ops.empty() ? "" : ", ") + std::string(row.op);
      std::erase_if(of_rule, [&](const OpRow& row) { return row.reason == reason; });
      std::cout << "\n";
      print_paragraph(ops, 2);
      print_paragraph(std::string(reason), 6);
    }
    std::cout << "\n";
  }
}

void print_differences(const Rows& rows) {
  size_t op_columns = 0;
  for (const OpRow& row : rows) op_columns = std::max(op_columns, row.op.size());
  auto line = [&](std::string_view op, std::string_view ours, std::string_view cpu, std::string_view cuda) {
    std::cout << std::left << std::setw(static_cast<int>(op_columns) + 2) << op << std::setw(10) << ours
              << std::setw(12) << cpu << cuda << "\n";
  };
  line("operation", "Halfstep", "stock CPU", "stock CUDA");
  for (const OpRow& row : rows)
    line(row.op, to_string(row.rule), to_string(row.stock_cpu), to_string(row.stock_cuda));
  std::cout << "\n"
            << rows.size() << " of " << op_table().size()
            << " operations differ from stock LibTorch on CPU or CUDA.\n"
               "'halfstep explain policy' gives the reasons; OpPolicy::stock() is stock.\n";
}

}  // namespace

namespace {

/// "E4M3 in blocks of 32, E8M0 scales".
std::string operand_text(const OperandRule& rule) {
  const std::string format = traits(rule.format).name;
  const char* const scales[] = {"FP32", "power-of-two", "E8M0", "E8M0", "no", "E4M3"};
  const std::string across = rule.block_across == 0 ? "all" : std::to_string(rule.block_across);
  const std::string along = rule.block_along == 0 ? "all" : std::to_string(rule.block_along);
  return format + " " + across + "x" + along + " " + scales[static_cast<int>(rule.scale)] +
         (rule.stochastic ? " stochastic" : "") + (rule.hadamard ? " Hadamard" : "");
}

std::string product_text(const ProductRule& rule) {
  return rule.quantised ? operand_text(rule.left) + " x " + operand_text(rule.right) : "high precision";
}

void explain_model(const ConfigRequest& request, bool as_json) {
  const ResolvedConfig resolved = configuration(request);
  const Trainer trainer = about_files([&] { return open_for_trial(resolved); });
  const std::vector<LayerPlan>& layers = trainer.layers();
  const std::optional<Recipe> recipe = trainer.recipe();
  if (as_json) {
    ordered_json answer{{"precision", resolved.config.precision.compute}, {"layers", ordered_json::array()}};
    if (recipe)
      answer["products"] = {{"forward", product_text(recipe->forward)},
                            {"input_grad", product_text(recipe->input_grad)},
                            {"weight_grad", product_text(recipe->weight_grad)}};
    for (const LayerPlan& layer : layers)
      answer["layers"].push_back({{"weight", layer.name},
                                  {"shape", {layer.rows, layer.columns}},
                                  {"quantised", layer.quantised},
                                  {"reason", layer.reason}});
    print_answer(answer);
    return;
  }
  std::cout << trainer.plan().model << ", " << trainer.plan().precision << "\n";
  if (!recipe) {
    std::cout << "No recipe: every product takes " << resolved.config.precision.compute
              << " operands. --precision mxfp8 names one.\n";
    return;
  }
  std::cout << "forward      x, w   " << product_text(recipe->forward) << "\n"
            << "input grad   dy, w  " << product_text(recipe->input_grad) << "\n"
            << "weight grad  dy, x  " << product_text(recipe->weight_grad) << "\n\n";
  size_t columns = 6;
  for (const LayerPlan& layer : layers) columns = std::max(columns, layer.name.size());
  for (const LayerPlan& layer : layers)
    std::cout << std::left << std::setw(static_cast<int>(columns) + 2)
              << printable(layer.name, Unprintable::Replaced) << std::setw(12)
              << (std::to_string(layer.rows) + "x" + std::to_string(layer.columns)) << std::setw(6)
              << (layer.quantised ? "yes" : "high") << layer.reason << "\n";
}

}  // namespace

void add_explain(CLI::App& program) {
  CLI::App* const explain = program.add_subcommand("explain", "Why Halfstep does what it does");
  explain->require_subcommand(1);
  CLI::App* const policy = explain->add_subcommand(
      "policy", "Which operation runs in which precision under AutocastScope, and why");
  CLI::Option* const json = add_switch(*policy, "--json", "As JSON");
  CLI::Option* const diff = policy->add_option("--diff", "Only what differs from this policy")
                                ->expected(1)
                                ->check(CLI::IsMember({"stock"}))
                                ->type_name("stock");
  CLI::App* const model =
      explain->add_subcommand("model", "Which layers of a run follow its recipe, in which formats, and why");
  auto request = std::make_shared<ConfigRequest>();
  add_config_options(*model, *request);
  CLI::Option* const model_json = add_switch(*model, "--json", "As JSON");
  model->callback([request, model_json] { explain_model(*request, model_json->count() > 0); });
  policy->callback([json, diff] {
    const Rows rows = rows_to_show(diff->count() > 0);
    if (json->count() > 0) {
      print_json(rows);
    } else if (diff->count() > 0) {
      print_differences(rows);
    } else {
      print_by_reason(rows);
      print_what_stays_in_fp32_here();
    }
  });
}

}  // namespace halfstep::cli
