// `halfstep`: exit code 0 when done, 1 when it could not be done, 2 when the command line is wrong.
#include <halfstep/memory.h>

#include <exception>
#include <iostream>

#include "cli/commands.h"

namespace {

constexpr int kFailed = 1;
constexpr int kUsage = 2;

int run(int argc, char** argv) {
  CLI::App program("Mixed-precision training for LibTorch.", "halfstep");
  CLI::Option* const version = halfstep::cli::add_version_flag(program);
  halfstep::cli::add_checkpoint(program);
  halfstep::cli::add_env(program);
  halfstep::cli::add_explain(program);
  halfstep::cli::add_tokenize(program);
  for (CLI::App* command : program.get_subcommands({})) command->excludes(version);
  program.footer("Every command has --help, and --json for programs that read the answer.");
  try {
    program.parse(argc, argv);
    if (argc == 1) throw CLI::RequiredError("A command or --version");
  } catch (const CLI::CallForHelp& help) {
    return program.exit(help);
  } catch (const CLI::ParseError& error) {
    std::cerr << "halfstep: " << error.what() << "\nRun 'halfstep --help' for what there is.\n";
    return kUsage;
  }
  if (!std::cout.flush()) {
    std::cerr << "halfstep: the output could not be written in full. Is the disk full?\n";
    return kFailed;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    halfstep::install_cpu_allocator();  // before the first tensor
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "halfstep: " << error.what() << "\n";
    return kFailed;
  }
}
