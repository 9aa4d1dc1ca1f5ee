// Text within HTML. Everything that comes from a log goes through `escaped`, and what has no limit of its own
// through `bounded`: the size of a page does not depend on its log.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace halfstep::report {

/// Fit for the text of an element and for an attribute in double quotes. Bytes that are not UTF-8 become
/// U+FFFD, control characters their pictures (U+2400 on), and those that turn the direction of text, U+FFFD.
std::string escaped(std::string_view text);

/// `escaped`, of at most so many bytes of it; what was cut is counted.
std::string bounded(std::string_view text, size_t most);

/// A text as JSON within a script element: plain ASCII, without a "<".
std::string json_text(std::string_view text);

/// The shortest that gives back six significant digits; "null" if it is not finite.
std::string json_number(double value);

struct Cell {
  std::string html;
  bool number = false;  ///< set to the right
};

/// Scrolls by itself where it is wider than the page.
std::string table(const std::vector<std::string>& headings, const std::vector<std::vector<Cell>>& rows);

/// The whole page around `body`.
std::string page(std::string_view title, std::string_view body);

}  // namespace halfstep::report
