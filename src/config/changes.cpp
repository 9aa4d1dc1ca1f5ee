#include <halfstep/run_config.h>

#include <set>

#include "config/key_text.h"
#include "config/toml.h"

namespace halfstep {
namespace {

using Text = std::optional<std::string>;  // of a value as TOML, if there is one

void add_change(std::vector<std::string>& changes, const std::string& path, const Text& before,
                const Text& now) {
  if (before == now) return;
  const std::string is = now ? " is now " + *now : " is no longer given";
  changes.push_back(path + is + ", was " + before.value_or("not given"));
}

Text rule_text(const std::map<std::string, std::string>& rules, const std::string& op) {
  const auto rule = rules.find(op);
  return rule == rules.end() ? Text() : config::toml_quoted(rule->second);
}

}  // namespace

std::vector<std::string> config_changes(RunConfig before, RunConfig now) {
  std::vector<std::string> changes;
  for (const ConfigKey& key : config_keys()) {
    const std::string path(key.path);
    if (path != config::kOpsPath) {
      add_change(changes, path, config::toml_text(key.field(before)), config::toml_text(key.field(now)));
      continue;
    }
    std::set<std::string> ops;
    for (const auto* rules : {&before.precision.ops, &now.precision.ops})
      for (const auto& [op, rule] : *rules) ops.insert(op);
    for (const std::string& op : ops)
      add_change(changes, path + "." + config::toml_key(op), rule_text(before.precision.ops, op),
                 rule_text(now.precision.ops, op));
  }
  return changes;
}

}  // namespace halfstep
