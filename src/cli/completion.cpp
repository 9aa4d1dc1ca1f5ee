// `halfstep completion` and `halfstep manual`: what shells and man read, made from the parser.
#include "cli/completion.h"

#include <iostream>

#include "cli/commands.h"

namespace halfstep::cli {

void add_completion(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("completion", "Write a shell's script of completions");
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, std::string("The shell"))
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->type_name("bash|zsh|fish");
  command->callback([&program, shell] {
    const Command root = command_tree(program);
    const auto write = *shell == "bash"  ? bash_completion
                       : *shell == "zsh" ? zsh_completion
                                         : fish_completion;
    std::cout << write(root);
  });
}

void add_manual(CLI::App& program) {
  program.add_subcommand("manual", "Write the manual page, for 'man -l -'")->callback([&program] {
    std::cout << manual_page(command_tree(program));
  });
}

}  // namespace halfstep::cli
