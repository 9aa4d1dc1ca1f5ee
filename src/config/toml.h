// TOML, flattened to dotted paths. The only file behind this header that sees toml++ is toml.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace halfstep::config {

/// An empty table. Of others what is in them are the entries.
struct TomlTable {};
/// What no key takes: "a date", "a list that is not all text".
struct TomlOther {
  std::string_view what;
};

using TomlValue =
    std::variant<bool, int64_t, double, std::string, std::vector<std::string>, TomlTable, TomlOther>;

struct TomlEntry {
  std::string path;  ///< "optimizer.lr", however the file spells it
  TomlValue value;
  uint32_t line = 0;
};

/// No configuration is larger; a model's weights, given by mistake, are.
inline constexpr size_t kMostConfigBytes = 256 * 1024;

/// Every value and empty table, in the order of the file. Throws an Error with `name`, line and column for
/// what is not TOML.
std::vector<TomlEntry> parse_toml(std::string_view text, std::string_view name);

/// The text as a TOML string, on one line.
std::string toml_quoted(std::string_view text);

/// A path's last part as TOML wants it: bare where that is allowed, else quoted.
std::string toml_key(std::string_view key);

}  // namespace halfstep::config
