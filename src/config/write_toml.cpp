#include <halfstep/error.h>
#include <halfstep/run_config.h>

#include <algorithm>

#include "config/key_text.h"
#include "config/toml.h"

namespace halfstep {
namespace {

constexpr size_t kOriginColumn = 40;
constexpr size_t kLongestOrigin = 80;

/// An origin fit for a comment: file names may hold anything.
std::string fit_for_comment(std::string origin) {
  if (origin.size() > kLongestOrigin) origin = "..." + origin.substr(origin.size() - kLongestOrigin + 3);
  const auto unusual = [](char c) { return c < 0x20 || c > 0x7e; };
  if (std::ranges::none_of(origin, unusual)) return origin;
  try {
    if (config::parse_toml("# " + origin, "comment").empty()) return origin;
  } catch (const Error&) {
  }
  std::ranges::replace_if(origin, unusual, '?');
  return origin;
}

void add_line(std::string& page, std::string line, const std::string& origin, bool with_origins) {
  if (with_origins) {
    line.resize(std::max(line.size() + 1, kOriginColumn), ' ');
    line += "# " + fit_for_comment(origin);
  }
  page += line + "\n";
}

}  // namespace

std::string to_toml(const ResolvedConfig& resolved, bool with_origins) {
  RunConfig config = resolved.config;
  std::string page;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    const bool is_table = key.path == config::kOpsPath;
    const size_t dot = key.path.rfind('.');
    if (const auto in = is_table ? key.path : key.path.substr(0, dot); in != section) {
      page += (page.empty() ? "[" : "\n[") + std::string(in) + "]\n";
      section = in;
    }
    const std::string name(key.path.substr(dot + 1));
    if (is_table) {
      for (const auto& [op, rule] : config.precision.ops)
        add_line(page, config::toml_key(op) + " = " + config::toml_quoted(rule),
                 resolved.origin(std::string(key.path) + "." + op), with_origins);
    } else if (const auto text = config::toml_text(key.field(config))) {
      add_line(page, name + " = " + *text, resolved.origin(key.path), with_origins);
    } else if (with_origins) {
      const std::string_view stands_for = key.if_not_given.empty() ? "nothing" : key.if_not_given;
      add_line(page, "# " + name, "not given: " + std::string(stands_for), true);
    }
  }
  return page;
}

}  // namespace halfstep
