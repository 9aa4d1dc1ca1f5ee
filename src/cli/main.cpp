// `halfstep`: its commands, and what becomes of errors.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/printable.h>
#include <unistd.h>

#include <exception>
#include <iostream>
#include <sstream>
#include <string>

#include "cli/commands.h"

namespace {

using namespace halfstep::cli;

// Whatever names of files and from files a message repeats; its own line ends stay.
std::string printable_lines(const std::string& message) {
  std::istringstream in(message);
  std::string lines;
  for (std::string line; std::getline(in, line);)
    lines += halfstep::printable(line, halfstep::Unprintable::Escaped) + "\n";
  return lines;
}

int run(int argc, char** argv) {
  CLI::App program("Mixed-precision training for LibTorch.", "halfstep");
  CLI::Option* const version = add_version_flag(program);
  add_checkpoint(program);
  add_compare(program);
  add_completion(program);
  add_env(program);
  add_explain(program);
  add_manual(program);
  add_preset(program);
  add_report(program);
  add_tokenize(program);
  add_train(program);
  for (CLI::App* command : program.get_subcommands({})) command->excludes(version);
  program.footer("Every command has --help, and --json for programs that read the answer.");
  try {
    program.parse(argc, argv);
    if (argc == 1) throw CLI::RequiredError("A command or --version");
  } catch (const CLI::CallForHelp& help) {
    return program.exit(help);
  } catch (const CLI::ParseError& error) {
    std::cerr << "halfstep: " << printable_lines(error.what())
              << "Run 'halfstep --help' for what there is.\n";
    return kUsage;
  }
  if (!std::cout.flush()) {
    std::cerr << "halfstep: the output could not be written in full: the disk is full, or what read it has "
                 "ended.\n";
    return kFailed;
  }
  return kDone;
}

// A descriptor from 0 to 2 that is closed would be given to the first file that is opened, and what is
// printed would be written into that file: a log, or a checkpoint.
void open_standard_descriptors() {
  int descriptor = 0;
  do descriptor = ::open("/dev/null", O_RDWR);
  while (descriptor >= 0 && descriptor <= STDERR_FILENO);
  if (descriptor >= 0) ::close(descriptor);
}

int failed(int code, const char* message) {
  if (*message != '\0') std::cerr << "halfstep: " << printable_lines(message);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_descriptors();
  try {
    halfstep::install_cpu_allocator();  // before the first tensor
    return run(argc, argv);
  } catch (const ExitWith& exit) {
    return failed(exit.code, exit.what());
  } catch (const halfstep::FileError& error) {
    return failed(kFiles, error.what());
  } catch (const c10::OutOfMemoryError& error) {
    return failed(kOutOfMemory, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return failed(kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return failed(kFailed, error.what());
  }
}
