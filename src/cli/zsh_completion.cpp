#include <algorithm>
#include <sstream>

#include "cli/completion.h"

namespace halfstep::cli {
namespace {

std::string function_of(const Command& command) {
  std::string name = "_halfstep";
  if (!command.path.empty()) name += "_" + command.path;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

// In a specification of _arguments: brackets end a description, colons end everything.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '[' || letter == ']' || letter == ':' || letter == '\\') result += '\\';
    result += letter;
  }
  return result;
}

std::string action_of(const Argument& argument) {
  switch (argument.kind) {
    case ValueKind::Words:
      return "(" + joined(argument.words, " ") + ")";
    case ValueKind::File:
      return "_files";
    case ValueKind::Folder:
      return "_files -/";
    case ValueKind::Setting:
      return "_halfstep_setting";
    case ValueKind::None:
    case ValueKind::Text:
      break;
  }
  return " ";
}

void write_option(std::ostream& out, const Argument& option) {
  for (const std::string& name : option.names) {
    std::string specification = option.repeated ? "*" : "(" + joined(option.names, " ") + ")";
    // "--name=" takes its value behind the sign or as the next word, "-o" as the next word.
    specification += name + (option.kind != ValueKind::None && name.starts_with("--") ? "=" : "");
    specification += "[" + escaped(option.about) + "]";
    if (option.kind != ValueKind::None) specification += ":" + escaped(option.type) + ":" + action_of(option);
    out << " \\\n    " << quoted(specification);
  }
}

void write_command(std::ostream& out, const Command& command) {
  out << "\n" << function_of(command) << "() {\n";
  if (!command.commands.empty()) out << "  local context curcontext=\"$curcontext\" state line\n";
  out << "  _arguments -C";
  for (const Argument& option : command.options) write_option(out, option);
  for (const Argument& argument : command.positionals)
    out << " \\\n    "
        << quoted((argument.repeated ? "*:" : ":") + escaped(argument.names.front()) + ":" +
                  action_of(argument));
  if (command.commands.empty()) {
    out << "\n}\n";
    return;
  }
  out << " \\\n    '1: :->command' '*:: :->rest'\n  case $state in\n    command)\n      local -a commands=(";
  for (const Command& below : command.commands)
    out << "\n        " << quoted(escaped(below.name) + ":" + below.about);
  out << ")\n      _describe command commands\n      ;;\n    rest)\n      case $words[1] in\n";
  for (const Command& below : command.commands)
    out << "        " << below.name << ") " << function_of(below) << " ;;\n";
  out << "      esac\n      ;;\n  esac\n}\n";
}

void write_settings(std::ostream& out) {
  out << "\n_halfstep_setting() {\n  if [[ $PREFIX == *=* ]]; then\n    local key=${PREFIX%%=*}\n"
         "    compset -P '*='\n    case $key in\n";
  std::ostringstream keys;
  for (const Setting& setting : settings()) {
    const std::string pattern = setting.key + (setting.is_table ? ".*" : "");
    if (!setting.words.empty())
      out << "      " << pattern << ") compadd -- " << joined(setting.words, " ") << " ;;\n";
    else if (setting.names_file)
      out << "      " << pattern << ") _files ;;\n";
    keys << "\n    " << quoted(setting.key + (setting.is_table ? "." : "=") + ":" + setting.about);
  }
  out << "    esac\n    return\n  fi\n  local -a keys=(" << keys.str();
  out << ")\n  _describe key keys -S ''\n}\n";
}

}  // namespace

std::string zsh_completion(const Command& root) {
  std::ostringstream out;
  out << "#compdef " << root.name << "\n# Written by 'halfstep completion zsh'.\n";
  write_settings(out);
  for (const Command* command : all_commands(root)) write_command(out, *command);
  // The file is the function when zsh loads it by itself, and defines it when it is sourced.
  out << "\nif [[ $funcstack[1] == _halfstep ]]; then\n  _halfstep \"$@\"\nelse\n  compdef _halfstep "
      << root.name << "\nfi\n";
  return out.str();
}

}  // namespace halfstep::cli
