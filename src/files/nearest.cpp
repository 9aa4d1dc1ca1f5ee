#include "files/nearest.h"

#include <algorithm>
#include <numeric>

#include "files/in_quotes.h"

namespace halfstep::files {
namespace {

// A suggestion is worth milliseconds, not seconds.
constexpr size_t kNamesCompared = 10'000;
constexpr size_t kLongestCompared = 256;

/// Levenshtein's distance.
size_t edits_between(std::string_view a, std::string_view b) {
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

/// "model.norm.weight" ends in the parts "norm.weight".
bool ends_in_parts(std::string_view name, std::string_view parts) {
  return name.size() > parts.size() && name.ends_with(parts) && name[name.size() - parts.size() - 1] == '.';
}

std::string question(std::string_view name) { return " Did you mean " + in_quotes(name) + "?"; }

}  // namespace

std::string did_you_mean(std::string_view wanted, const std::vector<std::string_view>& names) {
  if (names.size() > kNamesCompared || wanted.size() > kLongestCompared) return "";
  // A name that ends like the other differs by a prefix ("transformer.", "model."), the commonest mistake.
  for (const std::string_view name : names)
    if (ends_in_parts(name, wanted) || ends_in_parts(wanted, name)) return question(name);
  const std::string_view* nearest = nullptr;
  size_t fewest = wanted.size() / 4 + 2;  // edits beyond a quarter make another name
  for (const std::string_view& name : names) {
    if (name.size() > kLongestCompared) continue;
    const size_t edits = edits_between(wanted, name);
    if (edits < fewest) {
      fewest = edits;
      nearest = &name;
    }
  }
  return nearest ? question(*nearest) : "";
}

std::string did_you_mean(std::string_view wanted, const std::vector<TensorEntry>& entries) {
  if (entries.size() > kNamesCompared) return "";
  std::vector<std::string_view> names;
  for (const TensorEntry& entry : entries) names.push_back(entry.name);
  return did_you_mean(wanted, names);
}

}  // namespace halfstep::files
