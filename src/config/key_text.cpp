#include "config/key_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "config/toml.h"
#include "words/names.h"

namespace halfstep::config {
namespace {

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};

bool is_below(std::string_view path, std::string_view section) {
  return path.size() > section.size() && path.starts_with(section) && path[section.size()] == '.';
}

std::string words_text(const ConfigKey& key) {
  std::string all;
  for (const std::string_view word : key.words) all += (all.empty() ? "" : ", ") + std::string(word);
  return all;
}

/// A bound as people write it: "2^-126".
std::string bound_text(double bound) {
  int exponent = 0;
  const bool power_of_two = std::frexp(bound, &exponent) == 0.5;
  return power_of_two && (bound >= 0x1p32 || bound < 0x1p-10) ? "2^" + std::to_string(exponent - 1)
                                                              : number_text(bound);
}

std::string range_text(const ConfigRange& range) {
  if (std::isinf(range.least)) return "";
  const std::string low = (range.least_excluded ? " above " : " from ") + bound_text(range.least);
  return low +
         (range.most_excluded    ? " to below "
          : range.least_excluded ? ", at most "
                                 : " to ") +
         bound_text(range.most);
}

std::string number_kind(const ConfigKey& key, std::string_view kind) {
  const std::string unit = key.unit.empty() ? "" : " of " + std::string(key.unit);
  return std::string(kind) + unit + range_text(key.range);
}

std::string type_text(const ConfigKey& key) {
  RunConfig config;
  const auto whole = [&](auto) { return number_kind(key, "a whole number"); };
  const auto real = [&](auto) { return number_kind(key, "a number"); };
  return std::visit(
      Overloaded{
          [](bool*) { return std::string("true or false"); },
          [](std::optional<bool>*) { return std::string("true or false"); },
          [&](int64_t* field) { return whole(field); },
          [&](std::optional<int64_t>* field) { return whole(field); },
          [&](double* field) { return real(field); },
          [&](std::optional<double>* field) { return real(field); },
          [](std::vector<std::string>*) { return std::string("a list of texts"); },
          [](std::map<std::string, std::string>*) { return std::string("a table of operations"); },
          [](auto*) { return std::string("text"); },
      },
      key.field(config));
}

}  // namespace

const ConfigKey* find_key(std::string_view path) {
  for (const ConfigKey& key : config_keys())
    if (key.path == path || (key.path == kOpsPath && is_below(path, kOpsPath))) return &key;
  return nullptr;
}

bool is_section(std::string_view path) {
  return std::ranges::any_of(config_keys(), [&](const ConfigKey& key) { return is_below(key.path, path); });
}

std::string nearest_key(std::string_view path) {
  std::vector<std::string_view> paths;
  for (const ConfigKey& key : config_keys()) paths.push_back(key.path);
  const std::string nearest = did_you_mean(path, paths);
  // A key in the wrong section: "train.lr".
  const size_t dot = path.rfind('.');
  return nearest.empty() && dot != path.npos ? did_you_mean(path.substr(dot + 1), paths) : nearest;
}

std::string expectation(const ConfigKey& key) {
  return key.words.empty() ? type_text(key) : "one of " + words_text(key);
}

std::string default_sentence(const ConfigKey& key) {
  RunConfig config;
  if (!key.if_not_given.empty()) return "If not given: " + std::string(key.if_not_given) + ".";
  const auto text = toml_text(key.field(config));
  return text && *text != "[]" ? "The default is " + *text + "." : "";
}

std::string number_text(double value) {
  std::array<char, 32> text;
  char* const end = text.data() + text.size();
  // Without an exponent TOML takes it for a whole number, which ends at 2^63.
  const auto written = std::abs(value) < 1e15
                           ? std::to_chars(text.data(), end, value)
                           : std::to_chars(text.data(), end, value, std::chars_format::scientific);
  std::string number(text.data(), written.ptr);
  // "3e-04" as people write it: "3e-4".
  if (const size_t e = number.find('e'); e != number.npos) {
    if (number[e + 2] == '0') number.erase(e + 2, 1);
    if (number[e + 1] == '+') number.erase(e + 1, 1);
  }
  return number;
}

std::optional<std::string> toml_text(const ConfigField& field) {
  const Overloaded plain{
      [](bool value) { return std::string(value ? "true" : "false"); },
      [](int64_t value) { return std::to_string(value); },
      [](double value) { return number_text(value); },
      [](const std::string& value) { return toml_quoted(value); },
      [](const std::vector<std::string>& values) {
        std::string all;
        for (const std::string& value : values) all += (all.empty() ? "" : ", ") + toml_quoted(value);
        return "[" + all + "]";
      },
  };
  const auto of_optional = [&](const auto* value) -> std::optional<std::string> {
    return *value ? std::optional(plain(**value)) : std::nullopt;
  };
  return std::visit(Overloaded{
                        [&](std::optional<bool>* value) { return of_optional(value); },
                        [&](std::optional<int64_t>* value) { return of_optional(value); },
                        [&](std::optional<double>* value) { return of_optional(value); },
                        [&](std::optional<std::string>* value) { return of_optional(value); },
                        [](std::map<std::string, std::string>*) { return std::optional<std::string>(); },
                        [&](auto* value) { return std::optional<std::string>(plain(*value)); },
                    },
                    field);
}

std::string keys_as_markdown() {
  std::string page = "| key | value | default | what it does |\n|---|---|---|---|\n";
  for (const ConfigKey& key : config_keys()) {
    RunConfig config;
    const auto text = toml_text(key.field(config));
    const std::string fallback = text && *text != "[]" ? "`" + *text + "`" : std::string(key.if_not_given);
    page += "| `" + std::string(key.path) + "` | " + expectation(key) + " | " + fallback + " | " +
            std::string(key.help) + " |\n";
  }
  return page;
}

}  // namespace halfstep::config
