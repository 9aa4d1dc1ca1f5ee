// `halfstep --version`: what to put into a bug report.
#include <halfstep/config.h>
#include <halfstep/machine.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"

namespace halfstep::cli {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;  // "Debian Clang 19.1.7 (...)"
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

void print_plain(const TorchReport& torch) {
  std::cout << "halfstep " HALFSTEP_VERSION " (commit " HALFSTEP_COMMIT ")\n"
            << "compiler " << kCompiler << "\n"
            << "LibTorch " << torch.built_version << " built against, " << torch.loaded_version
            << " loaded\n";
}

void print_json(const TorchReport& torch) {
  const nlohmann::ordered_json answer = {
      {"version", HALFSTEP_VERSION},
      {"commit", HALFSTEP_COMMIT},
      {"compiler", kCompiler},
      {"torch", {{"built", torch.built_version}, {"loaded", torch.loaded_version}}},
  };
  print_answer(answer);
}

}  // namespace

CLI::Option* add_version_flag(CLI::App& program) {
  CLI::Option* const version =
      add_switch(program, "--version", "Versions of Halfstep, its compiler and LibTorch");
  CLI::Option* const json = add_switch(program, "--json", "The versions as JSON")->needs(version);
  program.callback([version, json] {
    if (version->count() == 0) return;
    const TorchReport torch = inspect_machine().torch;
    json->count() > 0 ? print_json(torch) : print_plain(torch);
  });
  return version;
}

}  // namespace halfstep::cli
