// The command line as data: what completions and the manual are made from. Taken from the parser itself, so
// that they cannot say something else.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace halfstep::cli {

/// What may stand behind an option, or as an argument.
enum class ValueKind {
  None,     ///< a flag
  Text,     ///< anything
  Words,    ///< one of Argument::words
  File,     ///< type names FILE and TEXT of positional arguments
  Folder,   ///< type name DIR
  Setting,  ///< KEY=VALUE, of config_keys()
};

struct Argument {
  std::vector<std::string> names{};  ///< "-o", "--output"; of a positional argument, its one name
  std::string type{};                ///< "FILE", "nanogpt|llmc"
  std::string about{};
  ValueKind kind = ValueKind::None;
  std::vector<std::string> words{};
  bool required = false;
  bool repeated = false;
};

struct Command {
  std::string path{};  ///< "checkpoint inspect"; empty for the program itself
  std::string name{};
  std::string about{};
  std::vector<Argument> options{};
  std::vector<Argument> positionals{};
  std::vector<Command> commands{};
};

/// A key of the configuration, as it is written before '='.
struct Setting {
  std::string key{};
  std::string about{};
  std::vector<std::string> words{};  ///< all that may stand behind '='; anything if empty
  bool names_file = false;
  bool is_table = false;  ///< a name of the user's follows the key: precision.ops.softmax
};

std::vector<Setting> settings();

Command command_tree(const CLI::App& program);

/// The command and all below it, parents first.
std::vector<const Command*> all_commands(const Command& root);

/// With `between` in between.
std::string joined(const std::vector<std::string>& words, std::string_view between);

}  // namespace halfstep::cli
