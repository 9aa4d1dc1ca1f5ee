#include <sstream>

#include "cli/completion.h"

namespace halfstep::cli {
namespace {

// fish knows no nested commands: a function finds the one that the words before the cursor lead to.
void write_path_function(std::ostream& out, const std::vector<const Command*>& commands) {
  out << "function __halfstep_at --description 'Whether the words lead to this command of halfstep'\n"
         "    set -l path\n"
         "    for word in (commandline -opc)[2..]\n"
         "        switch \"$path $word\"\n            case";
  for (const Command* command : commands) {
    if (command->path.empty()) continue;
    const size_t cut = command->path.rfind(' ');
    const std::string parent = cut == std::string::npos ? "" : command->path.substr(0, cut);
    out << " " << quoted(parent + " " + command->name);
  }
  out << "\n                set path (string trim \"$path $word\")\n"
         "        end\n    end\n    test \"$path\" = \"$argv\"\nend\n\n";
}

void write_settings_function(std::ostream& out) {
  out << "function __halfstep_settings --description 'Keys of the configuration, with their words'\n"
         "    printf '%s\\t%s\\n'";
  for (const Setting& setting : settings()) {
    const std::string about = quoted(setting.about);
    if (setting.is_table)
      out << " \\\n        " << setting.key << ". " << about;
    else if (setting.words.empty())
      out << " \\\n        " << setting.key << "= " << about;
    else
      for (const std::string& word : setting.words)
        out << " \\\n        " << setting.key << "=" << word << " " << about;
  }
  out << "\nend\n\n";
}

std::string value_of(const Argument& argument) {
  switch (argument.kind) {
    case ValueKind::None:
      return "";
    case ValueKind::Text:
      return " -x";
    case ValueKind::Words:
      return " -xa " + quoted(joined(argument.words, " "));
    case ValueKind::File:
      return " -rF";
    case ValueKind::Folder:
      return " -xa '(__fish_complete_directories)'";
    case ValueKind::Setting:
      return " -xa '(__halfstep_settings)'";
  }
  return "";
}

void write_command(std::ostream& out, const Command& command) {
  const std::string where = "complete -c halfstep -n " + quoted("__halfstep_at " + command.path);
  for (const Command& below : command.commands)
    out << where << " -a " << below.name << " -d " << quoted(below.about) << "\n";
  for (const Argument& option : command.options) {
    out << where;
    for (const std::string& name : option.names)
      out << (name.starts_with("--") ? " -l " : " -s ") << name.substr(name.starts_with("--") ? 2 : 1);
    out << value_of(option) << " -d " << quoted(option.about) << "\n";
  }
  for (const Argument& argument : command.positionals) {
    if (argument.kind == ValueKind::Words)
      out << where << " -a " << quoted(joined(argument.words, " ")) << "\n";
    else
      out << where << " -F\n";
  }
}

}  // namespace

std::string fish_completion(const Command& root) {
  std::ostringstream out;
  const std::vector<const Command*> commands = all_commands(root);
  out << "# Completes halfstep's command line. Written by 'halfstep completion fish'.\n";
  write_path_function(out, commands);
  write_settings_function(out);
  out << "complete -c halfstep -f\n";
  for (const Command* command : commands) write_command(out, *command);
  return out.str();
}

}  // namespace halfstep::cli
