#include <sstream>

#include "cli/completion.h"

namespace halfstep::cli {
namespace {

// The words are taken from the line, because bash cuts them at '=' too. What is offered must then begin
// behind the last '=', where bash thinks that the word begins.
constexpr const char* kBegin = R"(# Completes halfstep's command line. Written by 'halfstep completion bash'.
_halfstep_words() { mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2"); }
_halfstep_paths() { compopt -o filenames; mapfile -t COMPREPLY < <(compgen "$1" -- "$2"); }

_halfstep() {
  local line=${COMP_LINE:0:COMP_POINT} words current= path= option= value= at
  read -ra words <<<"$line"
  if [[ $line != *[[:space:]] ]]; then
    current=${words[-1]}
    unset 'words[-1]'
  fi
  COMPREPLY=()
  for ((at = 1; at < ${#words[@]}; ++at)); do
    local word=${words[at]}
    if [[ -n $option ]]; then
      option=
    elif [[ $word == -*=* ]]; then
      :
    elif [[ $word == -* ]]; then
      if _halfstep_takes_value "$path $word"; then option=$word; fi
    elif _halfstep_is_command "${path:+$path }$word"; then
      path=${path:+$path }$word
    fi
  done
  value=$current
  if [[ -z $option && $current == --*=* ]]; then
    option=${current%%=*}
    value=${current#*=}
  fi
  if [[ -n $option ]]; then
    _halfstep_value "$path $option" "$value"
  elif [[ $current == -* ]]; then
    _halfstep_options "$path" "$current"
  else
    _halfstep_arguments "$path" "$current"
  fi
  if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then
    local before=${value%"${value##*=}"}
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
  fi
}
)";

std::string offer(const Argument& argument) {
  switch (argument.kind) {
    case ValueKind::Words:
      return "_halfstep_words " + quoted(joined(argument.words, " ")) + " \"$2\"";
    case ValueKind::File:
      return "_halfstep_paths -f \"$2\"";
    case ValueKind::Folder:
      return "_halfstep_paths -d \"$2\"";
    case ValueKind::Setting:
      return "_halfstep_setting \"$2\"";
    case ValueKind::None:
    case ValueKind::Text:
      break;
  }
  return ":";
}

std::string patterns(const Command& command, const Argument& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.names) names.push_back(quoted(command.path + " " + name));
  return joined(names, "|");
}

void write_values(std::ostream& out, const std::vector<const Command*>& commands) {
  out << "\n_halfstep_takes_value() {\n  case $1 in\n";
  for (const Command* command : commands)
    for (const Argument& option : command->options)
      if (option.kind != ValueKind::None) out << "    " << patterns(*command, option) << ") return 0 ;;\n";
  out << "  esac\n  return 1\n}\n\n_halfstep_value() {\n  case $1 in\n";
  for (const Command* command : commands)
    for (const Argument& option : command->options)
      if (option.kind != ValueKind::None)
        out << "    " << patterns(*command, option) << ") " << offer(option) << " ;;\n";
  out << "  esac\n}\n";
}

void write_commands(std::ostream& out, const std::vector<const Command*>& commands) {
  out << "\n_halfstep_is_command() {\n  case $1 in\n";
  for (const Command* command : commands)
    if (!command->path.empty()) out << "    " << quoted(command->path) << ") return 0 ;;\n";
  out << "  esac\n  return 1\n}\n\n_halfstep_options() {\n  case $1 in\n";
  for (const Command* command : commands) {
    std::vector<std::string> names;
    for (const Argument& option : command->options) names.push_back(joined(option.names, " "));
    out << "    " << quoted(command->path) << ") _halfstep_words " << quoted(joined(names, " "))
        << " \"$2\" ;;\n";
  }
  out << "  esac\n}\n\n_halfstep_arguments() {\n  case $1 in\n";
  for (const Command* command : commands) {
    out << "    " << quoted(command->path) << ") ";
    std::vector<std::string> names;
    for (const Command& below : command->commands) names.push_back(below.name);
    if (!names.empty())
      out << "_halfstep_words " << quoted(joined(names, " ")) << " \"$2\"";
    else
      out << (command->positionals.empty() ? ":" : offer(command->positionals.front()));
    out << " ;;\n";
  }
  out << "  esac\n}\n";
}

void write_settings(std::ostream& out) {
  std::vector<std::string> keys;
  out << "\n_halfstep_setting() {\n  local key=${1%%=*}\n  case $1 in\n";
  for (const Setting& setting : settings()) {
    keys.push_back(setting.key + (setting.is_table ? "." : "="));
    const std::string pattern = setting.key + (setting.is_table ? ".*=*" : "=*");
    if (!setting.words.empty())
      out << "    " << pattern << ") _halfstep_words \"$key=" << joined(setting.words, " $key=")
          << "\" \"$1\" ;;\n";
    else if (setting.names_file)
      out << "    " << pattern << ") _halfstep_paths -f \"${1#*=}\" ;;\n";
  }
  out << "    *=*) ;;\n    *)\n      compopt -o nospace\n      _halfstep_words " << quoted(joined(keys, " "))
      << " \"$1\"\n      ;;\n  esac\n}\n";
}

}  // namespace

std::string bash_completion(const Command& root) {
  std::ostringstream out;
  const std::vector<const Command*> commands = all_commands(root);
  out << kBegin;
  write_values(out, commands);
  write_commands(out, commands);
  write_settings(out);
  out << "\ncomplete -F _halfstep " << root.name << "\n";
  return out.str();
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) letter == '\'' ? result += "'\\''" : result += letter;
  return result + "'";
}

}  // namespace halfstep::cli
