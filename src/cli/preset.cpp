// `halfstep preset`: runs that need no file.
#include <halfstep/error.h>
#include <halfstep/run_config.h>

#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"

namespace halfstep::cli {
namespace {

void list(bool json) {
  if (json) {
    auto presets = nlohmann::ordered_json::array();
    for (const ConfigPreset& preset : config_presets())
      presets.push_back({{"name", preset.name}, {"summary", preset.summary}});
    print_answer(presets);
    return;
  }
  size_t widest = 0;
  for (const ConfigPreset& preset : config_presets()) widest = std::max(widest, preset.name.size());
  for (const ConfigPreset& preset : config_presets())
    std::cout << std::left << std::setw(static_cast<int>(widest)) << preset.name << "  " << preset.summary
              << "\n";
}

void show(const std::string& name) {
  ResolvedConfig resolved;
  try {
    resolved = resolve_config({.preset = name});
  } catch (const Error& error) {
    throw ExitWith(kUsage, error.what());
  }
  std::cout << to_toml(resolved, /*with_origins=*/false);
}

}  // namespace

void add_preset(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("preset", "Runs that need no file");
  command->require_subcommand(1);
  CLI::App* const ls = command->add_subcommand("ls", "Their names");
  CLI::Option* const json = add_switch(*ls, "--json", "The answer as JSON");
  ls->callback([json] { list(json->count() > 0); });
  CLI::App* const show_command =
      command->add_subcommand("show", "One as TOML, to be changed and given to 'train'");
  auto name = std::make_shared<std::string>();
  show_command->add_option("NAME", *name, "Of 'halfstep preset ls'")->required();
  show_command->callback([name] { show(*name); });
}

}  // namespace halfstep::cli
