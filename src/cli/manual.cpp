#include "cli/completion.h"

#include <halfstep/config.h>
#include <halfstep/run_config.h>

#include <algorithm>
#include <optional>
#include <sstream>

namespace halfstep::cli {
namespace {

constexpr const char* kExitStatus = R"(.SH EXIT STATUS
.TP
.B 0
Done.
.TP
.B 1
It failed for a reason that has no exit code of its own.
.TP
.B 2
The command line or the configuration is wrong.
.TP
.B 3
Data or a checkpoint is missing or damaged, or the disk refuses.
.TP
.B 4
The run diverged: too many steps in a row were skipped.
.TP
.B 5
Out of memory.
.TP
.BR 130 ", " 138 ", " 143
Stopped by SIGINT, SIGUSR1 or SIGTERM, after saving. A second signal ends the program at once.
)";

constexpr const char* kEnvironment = R"(.SH ENVIRONMENT
.TP
.B HALFSTEP_TORCH
The folder of the LibTorch to run with: that of the Python package torch, or of an unpacked libtorch. Read by the
packaged program before it tries an active virtual environment and
.BR python3 .
.TP
.BI HALFSTEP_ SECTION __ KEY
A key of the configuration: HALFSTEP_OPTIMIZER__LR stands for optimizer.lr.
.TP
.B NO_COLOR
If set and not empty, nothing is written in colour.
)";

// A backslash and a dash mean something to roff, and so do a dot and a quote at the beginning of a line.
std::string roff(std::string_view text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '\\')
      result += "\\e";
    else if (letter == '-')
      result += "\\-";
    else
      result += letter;
  }
  return result.starts_with('.') || result.starts_with('\'') ? "\\&" + result : result;
}

std::string bold(std::string_view text) { return "\\fB" + roff(text) + "\\fR"; }
std::string italic(std::string_view text) { return "\\fI" + roff(text) + "\\fR"; }

std::string usage_of(const Command& root, const Command& command) {
  std::string usage = bold(root.name + (command.path.empty() ? "" : " " + command.path));
  if (!command.commands.empty()) usage += " " + italic("COMMAND");
  if (command.options.size() > 1)
    usage += " [" + italic("OPTIONS") + "]";  // --help alone is not worth telling
  for (const Argument& argument : command.positionals) {
    const std::string name = italic(argument.names.front()) + (argument.repeated ? "..." : "");
    usage += argument.required ? " " + name : " [" + name + "]";
  }
  return usage;
}

void write_argument(std::ostream& out, const Argument& argument, bool positional) {
  std::vector<std::string> names;
  for (const std::string& name : argument.names) names.push_back(positional ? italic(name) : bold(name));
  out << ".TP\n" << joined(names, ", ");
  if (!positional && argument.kind != ValueKind::None) out << " " << italic(argument.type);
  out << "\n" << roff(argument.about) << (argument.about.ends_with('.') ? "" : ".");
  if (argument.kind == ValueKind::Words && argument.type.find('|') == std::string::npos)
    out << " One of " << roff(joined(argument.words, ", ")) << ".";
  if (argument.required && !positional) out << " Required.";
  out << "\n";
}

void write_command(std::ostream& out, const Command& root, const Command& command) {
  out << ".SS " << roff(root.name + " " + command.path) << "\n"
      << roff(command.about) << ".\n.PP\n"
      << usage_of(root, command) << "\n";
  for (const Argument& argument : command.positionals) write_argument(out, argument, true);
  for (const Argument& option : command.options)
    if (option.names.back() != "--help") write_argument(out, option, false);
}

// The key's default as text, or nothing where it has none of its own.
struct DefaultText {
  std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
  std::string operator()(const int64_t* value) const { return std::to_string(*value); }
  std::string operator()(const double* value) const {
    std::ostringstream text;
    text << *value;
    return text.str();
  }
  std::string operator()(const std::string* value) const { return "\"" + *value + "\""; }
  template <typename T>
  std::string operator()(const T*) const {
    return "";
  }
};

void write_keys(std::ostream& out) {
  out << ".SH CONFIGURATION\n"
         "From a preset, a TOML file, the environment and "
      << bold("--set") << "; later ones win. " << bold("halfstep train --print-config")
      << "\nshows each value and where it came from.\n";
  RunConfig defaults;
  for (const ConfigKey& key : config_keys()) {
    out << ".TP\n" << bold(key.path);
    if (!key.unit.empty()) out << " (" << roff(key.unit) << ")";
    out << "\n" << roff(key.help);
    const std::vector<std::string> words(key.words.begin(), key.words.end());
    if (!words.empty()) out << " One of " << roff(joined(words, ", ")) << ".";
    const std::string value = std::visit(DefaultText{}, key.field(defaults));
    if (!value.empty()) out << " Default: " << roff(value) << ".";
    if (!key.if_not_given.empty()) out << " If not given: " << roff(key.if_not_given) << ".";
    out << "\n";
  }
  out << ".SH PRESETS\n";
  for (const ConfigPreset& preset : config_presets())
    out << ".TP\n" << bold(preset.name) << "\n" << roff(preset.summary) << "\n";
}

}  // namespace

std::string manual_page(const Command& root) {
  std::ostringstream out;
  out << ".\\\" Written by 'halfstep manual'.\n"
      << ".TH HALFSTEP 1 \"\" \"Halfstep " << HALFSTEP_VERSION << "\" \"User Commands\"\n"
      << ".SH NAME\nhalfstep \\- " << roff(root.about.substr(0, root.about.find_last_not_of('.') + 1)) << "\n"
      << ".SH SYNOPSIS\n"
      << usage_of(root, root) << "\n"
      << ".SH DESCRIPTION\n"
      << "Trains models in mixed precision with LibTorch, and inspects what such runs write. Every command "
         "has\n"
      << bold("--help") << ", and those that answer have " << bold("--json") << ".\n.SH OPTIONS\n";
  for (const Argument& option : root.options) write_argument(out, option, false);
  out << ".SH COMMANDS\n";
  for (const Command* command : all_commands(root))
    if (!command->path.empty() && command->commands.empty()) write_command(out, root, *command);
  write_keys(out);
  out << kEnvironment << kExitStatus;
  return out.str();
}

}  // namespace halfstep::cli
