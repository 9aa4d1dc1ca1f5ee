#include "words/names.h"

#include <halfstep/printable.h>

#include <algorithm>
#include <numeric>

namespace halfstep {
namespace {

// A suggestion is worth milliseconds, not seconds.
constexpr size_t kNamesCompared = 10'000;
constexpr size_t kLongestCompared = 256;

/// "model.norm.weight" ends in the parts "norm.weight".
bool ends_in_parts(std::string_view name, std::string_view parts) {
  return name.size() > parts.size() && name.ends_with(parts) && name[name.size() - parts.size() - 1] == '.';
}

std::string question(std::string_view name) { return " Did you mean " + in_quotes(name) + "?"; }

}  // namespace

std::string_view beginning_of(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  // Bytes 10xxxxxx continue a character.
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 80;
  const std::string_view shown = beginning_of(text, kShown);
  std::string result = "'" + printable(shown, Unprintable::Escaped) + "'";
  if (shown.size() < text.size()) result += "... (" + std::to_string(text.size()) + " bytes)";
  return result;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string did_you_mean(std::string_view wanted, const std::vector<std::string_view>& names) {
  if (names.size() > kNamesCompared || wanted.size() > kLongestCompared) return "";
  // A name that ends like the other differs by a prefix ("transformer.", "model."), the commonest mistake.
  for (const std::string_view name : names)
    if (ends_in_parts(name, wanted) || ends_in_parts(wanted, name)) return question(name);
  const std::string_view* nearest = nullptr;
  size_t fewest = wanted.size() / 4 + 2;  // edits beyond a quarter make another name
  for (const std::string_view& name : names) {
    if (name.size() > kLongestCompared) continue;
    const size_t edits = edit_distance(wanted, name);
    if (edits < fewest) {
      fewest = edits;
      nearest = &name;
    }
  }
  return nearest ? question(*nearest) : "";
}

}  // namespace halfstep
