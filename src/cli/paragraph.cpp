#include "cli/paragraph.h"

#include <iostream>
#include <sstream>

namespace halfstep::cli {

void print_paragraph(const std::string& text, int indent) {
  constexpr size_t kColumns = 80;
  const std::string margin(indent, ' ');
  std::string line;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!line.empty() && indent + line.size() + 1 + word.size() > kColumns) {
      std::cout << margin << line << "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  std::cout << margin << line << "\n";
}

}  // namespace halfstep::cli
