#include <halfstep/error.h>
#include <halfstep/op_policy.h>

#include <algorithm>

#include "words/names.h"

namespace halfstep {
namespace {

std::string_view without_overload(std::string_view op) { return op.substr(0, op.find('.')); }

std::string_view nearest_op(std::string_view op) {
  const auto distance = [op](const OpRow& row) {
    return std::min(edit_distance(op, row.op), edit_distance(op, without_overload(row.op)));
  };
  const auto table = op_table();
  const auto nearest = std::min_element(
      table.begin(), table.end(), [&](const OpRow& a, const OpRow& b) { return distance(a) < distance(b); });
  return nearest->op;
}

[[noreturn]] void refuse_unknown(std::string_view op) {
  detail::throw_error(detail::concat("OpPolicy: no row for operation '", op, "'. Did you mean '",
                                     nearest_op(op), "'? `halfstep explain policy` lists all rows."));
}

}  // namespace

OpPolicy OpPolicy::standard() {
  static const OpPolicy policy = [] {
    Rules rules;
    for (const OpRow& row : op_table()) rules.push_back(row.rule);
    return OpPolicy(std::move(rules));
  }();
  return policy;
}

OpPolicy OpPolicy::stock() {
  static const OpPolicy policy(Rules(op_table().size(), OpRule::Stock));
  return policy;
}

OpPolicy& OpPolicy::set(std::string_view op, OpRule rule) {
  const auto table = op_table();
  auto changed = std::make_shared<Rules>(*rules_);
  bool found = false;
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (table[i].op != op && without_overload(table[i].op) != op) continue;
    (*changed)[i] = rule;
    found = true;
  }
  if (!found) refuse_unknown(op);
  rules_ = std::move(changed);
  return *this;
}

OpRule OpPolicy::rule(std::string_view op) const {
  const auto table = op_table();
  const auto row = std::find_if(table.begin(), table.end(), [op](const OpRow& r) { return r.op == op; });
  if (row == table.end()) refuse_unknown(op);
  return rule_of_row(static_cast<std::size_t>(row - table.begin()));
}

std::string_view to_string(OpRule rule) {
  switch (rule) {
    case OpRule::Low:
      return "low";
    case OpRule::Fp32:
      return "fp32";
    case OpRule::Promote:
      return "promote";
    case OpRule::First:
      return "first";
    case OpRule::AsIs:
      return "as is";
    case OpRule::Stock:
      return "stock";
  }
  HALFSTEP_BUG("OpRule ", static_cast<int>(rule), " has no name");
}

std::string_view to_string(StockRule rule) {
  switch (rule) {
    case StockRule::NotListed:
      return "not listed";
    case StockRule::Low:
      return "low";
    case StockRule::Fp32:
      return "fp32";
    case StockRule::Promote:
      return "promote";
    case StockRule::Refused:
      return "refused";
  }
  HALFSTEP_BUG("StockRule ", static_cast<int>(rule), " has no name");
}

bool agrees_with_stock(OpRule rule, StockRule stock) {
  switch (rule) {
    case OpRule::Low:
      return stock == StockRule::Low;
    case OpRule::Fp32:
      return stock == StockRule::Fp32;
    case OpRule::Promote:
      return stock == StockRule::Promote;
    case OpRule::First:
      return false;
    case OpRule::AsIs:
      return stock == StockRule::NotListed;
    case OpRule::Stock:
      return true;
  }
  HALFSTEP_BUG("OpRule ", static_cast<int>(rule), " is not comparable");
}

}  // namespace halfstep
