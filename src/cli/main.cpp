// `halfstep`: its commands, and what becomes of errors.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/printable.h>
#include <halfstep/run_config.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "words/names.h"

namespace halfstep::cli {

void print_answer(const nlohmann::ordered_json& answer) {
  std::cout << printable_json(answer.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace))
            << "\n";
}

}  // namespace halfstep::cli

namespace {

using namespace halfstep::cli;

/// A message has lines of its own; what somebody gave us on the command line or in the environment has none,
/// should the message repeat it.
std::string in_one_line(std::string message, std::string_view given) {
  if (given.find('\n') == given.npos) return message;
  const std::string shown = halfstep::printable(given, halfstep::Unprintable::Escaped);
  for (size_t at = 0; (at = message.find(given, at)) != message.npos; at += shown.size())
    message.replace(at, given.size(), shown);
  return message;
}

std::vector<std::string_view> all_given;  // arguments and the environment

// Whatever names of files and from files a message repeats; its own line ends stay.
std::string printable_lines(std::string message) {
  for (const std::string_view given : all_given) message = in_one_line(std::move(message), given);
  std::istringstream in(message);
  std::string lines;
  for (std::string line; std::getline(in, line);)
    lines += halfstep::printable(line, halfstep::Unprintable::Escaped) + "\n";
  return lines;
}

/// " Did you mean 'train'?", or how a key of the configuration is given, or "".
std::string suggestion(const CLI::App& program) {
  const auto unknown = program.remaining(/*recurse=*/true);
  if (unknown.empty()) return "";
  const auto given = program.get_subcommands();
  const CLI::App& command = given.empty() ? program : *given.front();
  const std::string word = unknown.front().substr(0, unknown.front().find('='));
  std::vector<std::string> known;
  if (word.starts_with("--")) {
    for (const CLI::Option* option : command.get_options())
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  } else {
    for (const CLI::App* each : command.get_subcommands([](const CLI::App*) { return true; }))
      known.push_back(each->get_name());
  }
  const std::string nearest = halfstep::did_you_mean(word, {known.begin(), known.end()});
  if (!nearest.empty() || !word.starts_with("--") || command.get_option_no_throw("--set") == nullptr)
    return nearest;
  std::string name = word == "--learning-rate" ? "lr" : word.substr(2);
  std::replace(name.begin(), name.end(), '-', '_');
  for (const halfstep::ConfigKey& key : halfstep::config_keys())
    if (key.path.substr(key.path.rfind('.') + 1) == name)
      return " It is a key: --set " + std::string(key.path) + "=...";
  return "";
}

/// `halfstep help CMD` is `halfstep CMD --help`.
std::vector<char*> with_help_as_option(int argc, char** argv) {
  static char option[] = "--help";
  std::vector<char*> words(argv, argv + argc);
  if (argc > 1 && std::string_view(argv[1]) == "help") {
    words.erase(words.begin() + 1);
    words.push_back(option);
  }
  words.push_back(nullptr);
  return words;
}

int run(int argc, char** given) {
  std::vector<char*> words = with_help_as_option(argc, given);
  char** const argv = words.data();
  CLI::App program("Mixed-precision training for LibTorch.", "halfstep");
  CLI::Option* const version = add_version_flag(program);
  add_bench(program);
  add_checkpoint(program);
  add_compare(program);
  add_completion(program);
  add_doctor(program);
  add_env(program);
  add_evaluate(program);
  add_explain(program);
  add_forecast(program);
  add_generate(program);
  add_launch(program, take_launched_command(argc, argv));
  add_manual(program);
  add_preset(program);
  add_rehearse(program);
  add_report(program);
  add_tokenize(program);
  add_train(program);
  for (CLI::App* command : program.get_subcommands({})) command->excludes(version);
  // Of a word that is no command there is no help, but the nearest one.
  const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  if (argc > 2 && argv[1][0] != '-' && std::string_view(given[1]) == "help" &&
      program.get_subcommands(is_named).empty())
    --argc;
  program.footer("Every command has --help, and --json for programs that read the answer.");
  try {
    program.parse(argc, argv);
    if (argc == 1) throw CLI::RequiredError("A command or --version");
  } catch (const CLI::CallForHelp& help) {
    return program.exit(help);
  } catch (const CLI::ParseError& error) {
    const std::string advice = suggestion(program);
    const auto used = program.get_subcommands();
    std::cerr << "halfstep: " << printable_lines(error.what() + (advice.empty() ? "" : "." + advice))
              << (used.empty() ? "Run 'halfstep --help' for a list of commands.\n"
                               : "Run 'halfstep " + used.front()->get_name() + " --help' for its options.\n");
    return kUsage;
  }
  if (!std::cout.flush()) {
    std::cerr << "halfstep: the output could not be written in full: the disk is full, or the program that "
                 "reads it has ended.\n";
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
  all_given.assign(argv, argv + argc);
  for (char** variable = environ; *variable; ++variable)
    all_given.push_back(std::string_view(*variable).substr(std::string_view(*variable).find('=') + 1));
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
