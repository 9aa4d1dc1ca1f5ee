// `halfstep explain policy`: which operation runs in which precision, and why.
#include <halfstep/op_policy.h>

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
                      {"reason", row.reason}});
  print_answer(answer);
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
  policy->callback([json, diff] {
    const Rows rows = rows_to_show(diff->count() > 0);
    if (json->count() > 0)
      print_json(rows);
    else if (diff->count() > 0)
      print_differences(rows);
    else
      print_by_reason(rows);
  });
}

}  // namespace halfstep::cli
