#include "cli/command_tree.h"

#include <halfstep/run_config.h>

#include <CLI/CLI.hpp>

#include <algorithm>

namespace halfstep::cli {
namespace {

// CLI11 2.1 tells a type as "nanogpt|llmc:{nanogpt,llmc}": the name that was given, and what checks it.
std::string name_of_type(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

std::vector<std::string> words_of_check(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t begin = type.find(":{"), end = type.find('}', begin);
  if (begin == std::string::npos || end == std::string::npos) return {};
  return CLI::detail::split(type.substr(begin + 2, end - begin - 2), ',');
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ConfigPreset& preset : config_presets()) names.emplace_back(preset.name);
  return names;
}

bool names_preset(const CLI::App& app, const CLI::Option& option) {
  const CLI::App* const parent = app.get_parent();
  const bool below_preset = parent != nullptr && parent->get_name() == "preset";
  return option.get_positional() ? below_preset : option.get_lnames() == std::vector<std::string>{"preset"};
}

Argument argument_of(const CLI::App& app, const CLI::Option& option) {
  const bool all_count = option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  Argument argument{.type = name_of_type(option),
                    .about = option.get_description(),
                    .words = names_preset(app, option) ? preset_names() : words_of_check(option),
                    .required = option.get_required(),
                    .repeated = option.get_items_expected_max() > 1 || all_count};
  if (option.get_positional()) {
    argument.names.push_back(option.get_name(true));
  } else {
    for (const std::string& name : option.get_snames()) argument.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) argument.names.push_back("--" + name);
  }
  if (option.get_items_expected_max() == 0)
    argument.kind = ValueKind::None;
  else if (!argument.words.empty())
    argument.kind = ValueKind::Words;
  else if (argument.type == "KEY=VALUE")
    argument.kind = ValueKind::Setting;
  else if (argument.type == "DIR")
    argument.kind = ValueKind::Folder;
  else if (argument.type == "FILE" || option.get_positional())
    argument.kind = ValueKind::File;
  else
    argument.kind = ValueKind::Text;
  return argument;
}

Command command_of(const CLI::App& app, const std::string& path) {
  Command command{.path = path, .name = app.get_name(), .about = app.get_description()};
  for (const CLI::Option* option : app.get_options())
    (option->get_positional() ? command.positionals : command.options).push_back(argument_of(app, *option));
  for (const CLI::App* below : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string between = path.empty() ? "" : " ";
    command.commands.push_back(command_of(*below, path + between + below->get_name()));
  }
  return command;
}

bool is_bool(const ConfigField& field) {
  return std::holds_alternative<bool*>(field) || std::holds_alternative<std::optional<bool>*>(field);
}

}  // namespace

std::vector<Setting> settings() {
  std::vector<Setting> all;
  RunConfig config;
  for (const ConfigKey& key : config_keys()) {
    const ConfigField field = key.field(config);
    Setting setting{.key = std::string(key.path),
                    .about = std::string(key.help),
                    .words = {key.words.begin(), key.words.end()},
                    .names_file = key.names_file,
                    .is_table = std::holds_alternative<std::map<std::string, std::string>*>(field)};
    if (is_bool(field)) setting.words = {"true", "false"};
    all.push_back(std::move(setting));
  }
  return all;
}

Command command_tree(const CLI::App& program) { return command_of(program, ""); }

std::vector<const Command*> all_commands(const Command& root) {
  std::vector<const Command*> all{&root};
  for (const Command& below : root.commands) {
    const auto deeper = all_commands(below);
    all.insert(all.end(), deeper.begin(), deeper.end());
  }
  return all;
}

std::string joined(const std::vector<std::string>& words, std::string_view between) {
  std::string text;
  for (const std::string& word : words) text.append(text.empty() ? "" : between).append(word);
  return text;
}

}  // namespace halfstep::cli
