#include "config/toml.h"

#include <halfstep/error.h>

#include <algorithm>
#include <tuple>

namespace halfstep::config {
namespace {

/// An assertion of toml++ does not hold.
struct ParserBroken {};

}  // namespace
}  // namespace halfstep::config

// Compiled into this file alone, so that no shared library is needed and none of its names leaves here.
#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#define TOML_MAX_NESTED_VALUES 32
// toml++ 3.3 asserts what a stranger's text decides ("[.a]"): it aborts, and under NDEBUG tells the compiler
// that such texts do not exist. Here an assertion is an exception in every build.
#undef NDEBUG
#define TOML_ASSERT(expression) ((expression) ? void() : throw ::halfstep::config::ParserBroken())
#include <toml++/toml.h>

namespace halfstep::config {
namespace {

// toml++ 3.3 limits the nesting of values but not of dotted keys (`a.a.a... = 1`), and frees tables by
// recursion: 30,000 dots would end the stack. Every level needs a dot or one of the 32 values.
constexpr size_t kMostDots = 1000;

/// Dots outside of strings and comments. Where the text is no TOML this may count differently than toml++
/// reads, but only behind the place where toml++ has stopped.
size_t dots_outside_strings(std::string_view text) {
  size_t dots = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '.') ++dots;
    if (c == '#') i = std::min(text.find('\n', i), text.size());
    if (c != '"' && c != '\'') continue;
    const std::string fence(text.substr(i, 3) == std::string(3, c) ? 3 : 1, c);
    for (i += fence.size(); i < text.size() && text.substr(i, fence.size()) != fence; ++i)
      if (c == '"' && text[i] == '\\') ++i;
    i += fence.size() - 1;
    // Up to two more quotes may stand before the fence that ends a string of many lines.
    while (fence.size() == 3 && i + 1 < text.size() && text[i + 1] == c) ++i;
  }
  return dots;
}

std::vector<std::string> all_text(const toml::array& list) {
  std::vector<std::string> texts;
  for (const toml::node& element : list)
    if (const auto* text = element.as_string()) texts.push_back(text->get());
  return texts;
}

TomlValue value_of(const toml::node& node) {
  if (const auto* value = node.as_boolean()) return value->get();
  if (const auto* value = node.as_integer()) return value->get();
  if (const auto* value = node.as_floating_point()) return value->get();
  if (const auto* value = node.as_string()) return value->get();
  if (const auto* list = node.as_array()) {
    std::vector<std::string> texts = all_text(*list);
    if (texts.size() == list->size()) return texts;
    return TomlOther{"a list that is not all text"};
  }
  return TomlOther{"a date or time"};
}

void flatten(const toml::table& table, const std::string& prefix, std::vector<TomlEntry>& entries) {
  for (const auto& [key, node] : table) {
    const std::string path = prefix + std::string(key.str());
    const auto* inner = node.as_table();
    if (inner && !inner->empty())
      flatten(*inner, path + ".", entries);
    else
      entries.push_back({path, inner ? TomlValue(TomlTable{}) : value_of(node), node.source().begin.line});
  }
}

/// What to do about a fault, by how toml++ describes it.
std::string_view remedy_of(std::string_view fault) {
  const auto has = [&](std::string_view words) { return fault.find(words) != fault.npos; };
  if (has("redefine")) return "Keep one of the two.";
  if (has("parsing floating-point") || (has("parsing") && has("integer")))
    return "Numbers go up to 1.7e308, whole ones to 9223372036854775807.";
  return "Text needs quotes, and every key a '='; see docs/configuration.md.";
}

[[noreturn]] void throw_syntax(const toml::parse_error& error, std::string_view name) {
  const toml::source_position at = error.source().begin;
  throw Error(detail::concat(name, ":", at.line, ":", at.column, ": this is not TOML: ", error.description(),
                             ". ", remedy_of(error.description())));
}

bool breaks_parser(std::string_view text) {
  try {
    (void)toml::parse(text);
  } catch (const toml::parse_error&) {
  } catch (const ParserBroken&) {
    return true;
  }
  return false;
}

/// The line at which an assertion fails. The parser reads forward, so every text that has this line whole
/// breaks it, and none that ends before.
size_t broken_line(std::string_view text) {
  std::vector<size_t> line_ends;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\n') line_ends.push_back(i + 1);
  const auto breaks = std::partition_point(line_ends.begin(), line_ends.end(),
                                           [&](size_t end) { return !breaks_parser(text.substr(0, end)); });
  return static_cast<size_t>(breaks - line_ends.begin()) + 1;
}

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, std::string_view name) {
  HALFSTEP_CHECK(text.size() <= kMostConfigBytes, name, ": has ", text.size(),
                 " bytes, and a configuration at most ", kMostConfigBytes, ". Is it another file?");
  const size_t dots = dots_outside_strings(text);
  HALFSTEP_CHECK(dots <= kMostDots, name, ": has ", dots,
                 " dots outside of texts, and a configuration at most ", kMostDots, ". Is it another file?");
  std::vector<TomlEntry> entries;
  try {
    flatten(toml::parse(text), "", entries);
  } catch (const toml::parse_error& error) {
    throw_syntax(error, name);
  } catch (const ParserBroken&) {
    throw Error(detail::concat(name, ":", broken_line(text), ": this is not TOML. ", remedy_of("")));
  }
  std::sort(entries.begin(), entries.end(), [](const TomlEntry& a, const TomlEntry& b) {
    return std::tie(a.line, a.path) < std::tie(b.line, b.path);
  });
  return entries;
}

std::string toml_quoted(std::string_view text) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\t') {
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += "\\u00";
      quoted += digits[byte >> 4];
      quoted += digits[byte & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string toml_key(std::string_view key) {
  const bool bare = !key.empty() && std::all_of(key.begin(), key.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
  return bare ? std::string(key) : toml_quoted(key);
}

}  // namespace halfstep::config
