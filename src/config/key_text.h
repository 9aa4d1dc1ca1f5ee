// What a key is, in words.
#pragma once

#include <halfstep/run_config.h>

#include <optional>
#include <string>
#include <string_view>

namespace halfstep::config {

inline constexpr std::string_view kOpsPath = "precision.ops";

/// The key of a path, or null. "precision.ops.softmax" belongs to "precision.ops".
const ConfigKey* find_key(std::string_view path);

/// Whether keys begin with this path: "precision", "precision.loss_scale".
bool is_section(std::string_view path);

/// " Did you mean 'optimizer.lr'?", or "".
std::string nearest_key(std::string_view path);

/// "a whole number of steps from 1 to 1e12", "one of fp32, tf32, bf16, fp16".
std::string expectation(const ConfigKey& key);

/// "The default is 8." or "If not given: 0.9.", or "".
std::string default_sentence(const ConfigKey& key);

/// The shortest text that reads back as the number.
std::string number_text(double value);

/// A field's value as TOML; nothing for one without a value, and for tables.
std::optional<std::string> toml_text(const ConfigField& field);

/// The table of docs/configuration.md.
std::string keys_as_markdown();

}  // namespace halfstep::config
