// The commands of `halfstep`. Each adds itself to the program; parsing the command line runs it.
#pragma once

#include <halfstep/error.h>
#include <halfstep/run_config.h>
#include <halfstep/trainer.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace halfstep::cli {

enum ExitCode : int {
  kDone = 0,
  kFailed = 1,    ///< anything that has no code of its own
  kUsage = 2,     ///< the command line or the configuration is wrong
  kFiles = 3,     ///< data or a checkpoint: missing, damaged, or the disk refuses
  kDiverged = 4,  ///< too many steps in a row were skipped, or the loss rose for good
  kOutOfMemory = 5,
  kUnsaved = 6,      ///< a second Ctrl-C: ended at once, without saving
  kOutOfTime = 7,    ///< train.time_limit_minutes, after saving
  kRankLost = 8,     ///< another rank is gone, or does not answer
  kFindings = 9,     ///< `doctor` has found something above a note
  kSignalled = 128,  ///< plus the signal: interrupted, after saving
};

/// Of `halfstep launch OPTIONS COMMAND...`, the command, whose words are not ours to parse.
std::vector<std::string> take_launched_command(int& argc, char** argv);

CLI::Option* add_version_flag(CLI::App& program);
void add_bench(CLI::App& program);
void add_checkpoint(CLI::App& program);
void add_compare(CLI::App& program);
void add_completion(CLI::App& program);
void add_doctor(CLI::App& program);
void add_env(CLI::App& program);
void add_evaluate(CLI::App& program);
void add_explain(CLI::App& program);
void add_forecast(CLI::App& program);
void add_generate(CLI::App& program);
void add_launch(CLI::App& program, std::vector<std::string> words);
void add_manual(CLI::App& program);
void add_preset(CLI::App& program);
void add_rehearse(CLI::App& program);
void add_report(CLI::App& program);
void add_tokenize(CLI::App& program);
void add_train(CLI::App& program);

/// How a configuration is named on the command line.
struct ConfigRequest {
  std::string preset, file, precision;
  std::vector<std::string> set, unset;
};

void add_config_options(CLI::App& command, ConfigRequest& request);

/// What is wrong with a configuration is wrong usage. `more` are further settings.
ResolvedConfig configuration(const ConfigRequest& request, const std::vector<std::string>& more = {});

/// Reads the data in part, makes the model, and leaves nothing behind: for questions about a run.
Trainer open_for_trial(const ResolvedConfig& resolved);

/// Ends the program with a code of its own; what() is told unless it is empty.
class ExitWith : public std::runtime_error {
 public:
  ExitWith(int code, const std::string& message) : std::runtime_error(message), code(code) {}
  const int code;
};

/// Runs what is about files and what is in them: an error of theirs has a code of its own.
template <typename Function>
auto about_files(Function function) {
  try {
    return function();
  } catch (const Bug&) {
    throw;
  } catch (const Error& error) {
    throw ExitWith(kFiles, error.what());
  }
}

/// The answer of `--json`.
void print_answer(const nlohmann::ordered_json& answer);

/// A count in decimal digits, also as it stands in a folder's name: 000000100. CLI11 would read that as
/// octal.
inline std::string decimal(std::string text) {
  if (text.empty() || text.find_first_not_of("0123456789") != text.npos)
    throw CLI::ValidationError(text + " is not a step: give a number in decimal digits");
  text.erase(0, std::min(text.find_first_not_of('0'), text.size() - 1));
  return text;
}

/// App::add_flag with a description; CLI11 2.1 finds a string literal there ambiguous in C++20.
inline CLI::Option* add_switch(CLI::App& app, const std::string& name, const std::string& description) {
  return app.add_flag(name, description);
}

}  // namespace halfstep::cli
