#include "config/sources.h"

#include <unistd.h>

#include <cctype>
#include <set>

#include "config/key_text.h"
#include "io/input_file.h"
#include "words/names.h"

namespace halfstep {
namespace config {
namespace {

constexpr std::string_view kVariablePrefix = "HALFSTEP_";

bool names_key(std::string_view variable) {
  return variable.starts_with(kVariablePrefix) &&
         variable.find("__", kVariablePrefix.size()) != variable.npos;
}

/// HALFSTEP_OPTIMIZER__LR: optimizer.lr
std::string path_of(std::string_view variable) {
  std::string path;
  for (size_t i = kVariablePrefix.size(); i < variable.size(); ++i) {
    const bool dot = variable.substr(i, 2) == "__";
    path += dot ? '.' : static_cast<char>(std::tolower(static_cast<unsigned char>(variable[i])));
    i += dot;
  }
  return path;
}

void unknown_key(const std::string& origin, std::string_view path, Faults& faults) {
  const std::string nearest = nearest_key(path);
  faults.add(origin, "unknown key ", in_quotes(path), ".",
             nearest.empty() ? " docs/configuration.md lists them all." : nearest);
}

void add_toml(std::string_view text, const std::string& name, bool with_lines, std::vector<Setting>& settings,
              Faults& faults) {
  std::set<std::string> seen;
  for (TomlEntry& entry : parse_toml(text, name)) {
    const std::string origin = with_lines ? name + ":" + std::to_string(entry.line) : name;
    const bool section = is_section(entry.path);
    if (std::holds_alternative<TomlTable>(entry.value) && (section || entry.path == kOpsPath)) continue;
    if (section)
      faults.add(origin, in_quotes(entry.path), " is a section, not a key. Write [", entry.path,
                 "] and its keys below.");
    else if (!find_key(entry.path))
      unknown_key(origin, entry.path, faults);
    else if (!seen.insert(entry.path).second)  // "a.b" in quotes beside a.b
      faults.add(origin, in_quotes(entry.path), " is given twice in this file. Keep one.");
    else
      settings.push_back({entry.path, std::move(entry.value), origin});
  }
}

void add_preset(const std::string& name, std::vector<Setting>& settings, Faults& faults) {
  std::vector<std::string_view> names;
  for (const ConfigPreset& preset : config_presets()) {
    if (preset.name == name) return add_toml(preset.toml, "preset " + name, false, settings, faults);
    names.push_back(preset.name);
  }
  std::string all;
  for (const std::string_view known : names) all += (all.empty() ? "" : ", ") + std::string(known);
  faults.add("--preset", "there is no preset ", in_quotes(name), ".", did_you_mean(name, names),
             " There are ", all, ".");
}

/// The value of a flag or variable. Quotes around text may be left out there: shells take them away.
TomlValue value_of(const ConfigKey& key, std::string_view text, const std::string& origin) {
  RunConfig config;
  const ConfigField field = key.field(config);
  const bool is_list = std::holds_alternative<std::vector<std::string>*>(field);
  const bool is_text = is_list || std::holds_alternative<std::string*>(field) ||
                       std::holds_alternative<std::optional<std::string>*>(field) || key.path == kOpsPath;
  const bool as_toml =
      !is_text || text.starts_with('"') || text.starts_with('\'') || (is_list && text.starts_with('['));
  // Bare text goes through the parser too: it knows what is valid UTF-8.
  std::vector<TomlEntry> entries;
  try {
    entries = parse_toml("v = " + (as_toml ? std::string(text) : toml_quoted(text)), origin);
  } catch (const Error&) {
  }
  HALFSTEP_CHECK(entries.size() == 1, origin, ": ", key.path, " is ", in_quotes(text), ", expected ",
                 expectation(key), ". ", default_sentence(key));
  return entries.front().value;
}

void add_text(const std::string& path, std::string_view text, const std::string& origin,
              std::vector<Setting>& settings, Faults& faults) {
  const ConfigKey* key = find_key(path);
  if (!key) return unknown_key(origin, path, faults);
  try {
    settings.push_back({path, value_of(*key, text, origin), origin});
  } catch (const Error& error) {
    faults.add(error);
  }
}

}  // namespace

std::vector<Setting> settings_of(const ConfigSources& sources, Faults& faults) {
  std::vector<Setting> settings;
  if (sources.preset) add_preset(*sources.preset, settings, faults);
  try {
    if (sources.file) add_toml(sources.file->text, sources.file->name, true, settings, faults);
  } catch (const Error& error) {
    faults.add(error);
  }
  for (const auto& [name, text] : sources.environment)
    if (names_key(name)) add_text(path_of(name), text, name, settings, faults);
  for (const std::string& path : sources.unset) {
    if (!find_key(path)) {
      unknown_key("--unset", path, faults);
      continue;
    }
    // All operations are unset by their table's name.
    std::erase_if(settings, [&](const Setting& setting) {
      return setting.path == path ||
             (path == kOpsPath && setting.path.starts_with(std::string(kOpsPath) + "."));
    });
  }
  for (const std::string& flag : sources.set) {
    const size_t equals = flag.find('=');
    if (equals == flag.npos)
      faults.add("--set", in_quotes(flag), " has no '='. Write --set optimizer.lr=3e-4.");
    else
      add_text(flag.substr(0, equals), std::string_view(flag).substr(equals + 1), "--set", settings, faults);
  }
  return settings;
}

}  // namespace config

ConfigText read_config_file(const std::filesystem::path& path) {
  const files::InputFile file(path);
  HALFSTEP_CHECK(file.size() <= config::kMostConfigBytes, path.string(), ": has ", file.size(),
                 " bytes, and a configuration at most ", config::kMostConfigBytes, ". Is it another file?");
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return {path.string(), std::move(text)};
}

std::vector<std::pair<std::string, std::string>> config_environment() {
  std::vector<std::pair<std::string, std::string>> found;
  for (char** variable = environ; variable && *variable; ++variable) {
    const std::string_view text = *variable;
    const size_t equals = text.find('=');
    if (equals != text.npos && config::names_key(text.substr(0, equals)))
      found.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

}  // namespace halfstep
