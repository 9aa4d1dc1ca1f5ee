#include "cli/terminal_text.h"

#include <sys/stat.h>
#include <unistd.h>
#include <utf8proc.h>

#include <algorithm>
#include <iostream>
#include <sstream>

#include "words/utf8.h"

namespace halfstep::cli {
namespace {

size_t columns_of(CodePoint point) {
  return static_cast<size_t>(utf8proc_charwidth(static_cast<utf8proc_int32_t>(point.value)));
}

// How many bytes of `text` fit into so many columns; at least one character, so that every line moves on.
size_t bytes_that_fit(std::string_view text, size_t columns) {
  size_t at = 0, taken = 0;
  while (at < text.size()) {
    const CodePoint next = code_point_at(text, at);
    taken += columns_of(next);
    if (taken > columns && at > 0) break;
    at += next.bytes;
  }
  return at;
}

}  // namespace

size_t columns_of(std::string_view printable_text) {
  size_t columns = 0;
  for (size_t at = 0; at < printable_text.size();) {
    const CodePoint next = code_point_at(printable_text, at);
    columns += columns_of(next);
    at += next.bytes;
  }
  return columns;
}

std::vector<std::string> wrapped(std::string_view printable_text, size_t columns, size_t indent) {
  std::vector<std::string> lines;
  do {
    const size_t margin = lines.empty() || indent + 1 >= columns ? 0 : indent;
    size_t bytes = bytes_that_fit(printable_text, columns - margin);
    if (bytes < printable_text.size() && printable_text[bytes] != ' ') {
      const size_t space = printable_text.rfind(' ', bytes);
      if (space != std::string_view::npos && space > 0) bytes = space;
    }
    lines.push_back(std::string(margin, ' ').append(printable_text.substr(0, bytes)));
    printable_text.remove_prefix(bytes);
    printable_text.remove_prefix(std::min(printable_text.find_first_not_of(' '), printable_text.size()));
  } while (!printable_text.empty());
  return lines;
}

void print_paragraph(const std::string& text, int indent) {
  constexpr size_t kColumns = 80;
  const std::string margin(indent, ' ');
  std::string line;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!line.empty() && margin.size() + columns_of(line) + 1 + columns_of(word) > kColumns) {
      std::cout << margin << line << "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  std::cout << margin << line << "\n";
}

void keep_answer_out_of(const std::string& file) {
  struct stat written{}, output{};
  if (::stat(file.c_str(), &written) != 0 || ::fstat(STDOUT_FILENO, &output) != 0) return;
  const bool same = written.st_dev == output.st_dev && written.st_ino == output.st_ino;
  if (same && !S_ISCHR(output.st_mode)) std::cout.rdbuf(std::cerr.rdbuf());
}

}  // namespace halfstep::cli
