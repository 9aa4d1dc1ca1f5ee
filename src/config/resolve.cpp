#include <halfstep/run_config.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "config/key_text.h"
#include "config/sources.h"
#include "config/toml.h"
#include "words/names.h"

namespace halfstep {
namespace config {
namespace {

// Together they keep what to_toml() writes below what parse_toml() reads.
constexpr size_t kMostTextBytes = 16 * 1024;
constexpr size_t kMostOps = 256;

/// "3 (a whole number)", for messages.
std::string described(const TomlValue& value) {
  struct Describe {
    std::string operator()(bool is) const { return is ? "true" : "false"; }
    std::string operator()(int64_t is) const { return std::to_string(is); }
    std::string operator()(double is) const { return number_text(is); }
    std::string operator()(const std::string& is) const { return "the text " + in_quotes(is); }
    std::string operator()(const std::vector<std::string>&) const { return "a list"; }
    std::string operator()(TomlTable) const { return "a table"; }
    std::string operator()(TomlOther is) const { return std::string(is.what); }
  };
  return std::visit(Describe{}, value);
}

/// Whether ATen could have an operation of this name. Whether it has one is for the table of operations to
/// say.
bool is_op_name(std::string_view name) {
  constexpr std::string_view letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.";
  return !name.empty() && name.size() <= 128 && name.find_first_not_of(letters) == name.npos;
}

/// For what others call by another name.
std::string_view our_word(std::string_view word) {
  constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"float16", "fp16"},       {"half", "fp16"},
      {"float32", "fp32"},       {"float", "fp32"},
      {"bfloat16", "bf16"},      {"fp8", "fp8-delayed"},
      {"float8", "fp8-delayed"}, {"adam", "adamw"},
      {"adamw_torch", "adamw"},  {"warmup_stable_decay", "wsd"}};
  const auto found = std::ranges::find(kWords, word, &std::pair<std::string_view, std::string_view>::first);
  return found == std::end(kWords) ? std::string_view() : found->second;
}

/// Puts one setting into its field, or throws an Error.
class Assignment {
 public:
  Assignment(const ConfigKey& key, const Setting& setting) : key_(key), setting_(setting) {}

  void operator()(bool* field) const { *field = get<bool>(); }
  void operator()(int64_t* field) const {
    if (const auto* real = std::get_if<double>(&setting_.value);
        real && std::trunc(*real) == *real && std::abs(*real) <= 0x1p53)
      refuse("Write it without point and exponent: " + std::to_string(static_cast<int64_t>(*real)) + ".");
    const int64_t value = get<int64_t>();
    check_range(static_cast<double>(value));
    *field = value;
  }
  void operator()(double* field) const {
    const auto* whole = std::get_if<int64_t>(&setting_.value);
    const double value = whole ? static_cast<double>(*whole) : get<double>();
    check_range(value);
    *field = value;
  }
  void operator()(std::string* field) const { *field = checked(get<std::string>()); }
  template <typename T>
  void operator()(std::optional<T>* field) const {
    T value{};
    (*this)(&value);
    *field = value;
  }
  void operator()(std::vector<std::string>* field) const {
    if (std::holds_alternative<std::string>(setting_.value)) {
      *field = {checked(get<std::string>())};
      return;
    }
    field->clear();
    for (const std::string& text : get<std::vector<std::string>>()) field->push_back(checked(text));
  }
  void operator()(std::map<std::string, std::string>* field) const {
    if (setting_.path == key_.path) refuse("Write " + setting_.path + ".softmax = \"low\".");
    const std::string op = setting_.path.substr(key_.path.size() + 1);
    if (!is_op_name(op)) refuse("Operations are named as in ATen: softmax, prod.dim_int.");
    (*field)[op] = checked(get<std::string>());
  }

 private:
  template <typename T>
  const T& get() const {
    const T* value = std::get_if<T>(&setting_.value);
    if (!value) refuse(default_sentence(key_));
    return *value;
  }

  /// Written so that a NaN fails: every comparison with one is false.
  void check_range(double value) const {
    const ConfigRange& range = key_.range;
    const bool fits = (range.least_excluded ? value > range.least : value >= range.least) &&
                      (range.most_excluded ? value < range.most : value <= range.most);
    if (!fits) refuse(default_sentence(key_));
  }

  const std::string& checked(const std::string& text) const {
    if (text.empty()) refuse("Leave the key out instead. " + default_sentence(key_));
    if (text.find('\0') != text.npos) refuse("It must not hold a NUL character.");
    if (!key_.words.empty() && std::ranges::find(key_.words, text) == key_.words.end()) {
      const std::string_view ours = our_word(text);
      const std::string nearest = std::ranges::find(key_.words, ours) != key_.words.end()
                                      ? " Did you mean " + in_quotes(ours) + "?"
                                      : did_you_mean(text, key_.words);
      refuse(nearest.empty() ? default_sentence(key_) : nearest.substr(1));
    }
    return text;
  }

  [[noreturn]] void refuse(const std::string& remedy) const {
    throw Error(detail::concat(setting_.origin, ": ", in_quotes(setting_.path), " is ",
                               described(setting_.value), ", expected ", expectation(key_), ".",
                               remedy.empty() ? "" : " ", remedy));
  }

  const ConfigKey& key_;
  const Setting& setting_;
};

void check_size(RunConfig& config, Faults& faults) {
  size_t bytes = 0;
  for (const ConfigKey& key : config_keys())
    if (const auto text = toml_text(key.field(config))) bytes += text->size();
  for (const auto& [op, rule] : config.precision.ops) bytes += op.size() + rule.size();
  if (bytes > kMostTextBytes)
    faults.add("configuration", "its texts have ", bytes, " bytes, at most ", kMostTextBytes,
               " are taken. For many files, name their folder.");
  if (config.precision.ops.size() > kMostOps)
    faults.add("precision.ops", "has ", config.precision.ops.size(), " operations, at most ", kMostOps,
               " are taken.");
}

}  // namespace
}  // namespace config

std::string ResolvedConfig::origin(std::string_view path) const {
  const auto found = origins.find(path);
  return found == origins.end() ? "default" : found->second;
}

namespace {

using config::Contradiction, config::Faults, config::Setting;

ResolvedConfig assigned(const std::vector<Setting>& settings, Faults& faults) {
  ResolvedConfig resolved;
  for (const Setting& setting : settings) {
    const ConfigKey& key = *config::find_key(setting.path);
    try {
      std::visit(config::Assignment(key, setting), key.field(resolved.config));
      resolved.origins[setting.path] = setting.origin;
    } catch (const Error& error) {
      faults.add(error);
    }
  }
  return resolved;
}

/// A preset goes with itself: what contradicts a value of it came from elsewhere, and is meant.
void leave_out_of_preset(const std::string& preset, std::vector<Setting>& settings,
                         ResolvedConfig& resolved) {
  const std::string origin = "preset " + preset;
  std::set<std::string> needed;  // without these something else is missing
  std::vector<std::string> notes;
  for (;;) {
    const auto found = config::contradictions(resolved);
    const auto next = std::ranges::find_if(found, [&](const Contradiction& each) {
      return resolved.origin(each.path) == origin && !needed.contains(each.path);
    });
    if (next == found.end()) break;
    std::vector<Setting> rest = settings;
    std::erase_if(rest, [&](const Setting& setting) { return setting.path == next->path; });
    Faults none;  // every value was taken before
    ResolvedConfig without = assigned(rest, none);
    const auto still = config::contradictions(without);
    if (std::ranges::any_of(still, [&](const Contradiction& each) { return each.path == next->path; })) {
      needed.insert(next->path);
      continue;
    }
    notes.push_back(next->path + " of " + origin + " is left out: it " + next->why);
    settings = std::move(rest);
    resolved = std::move(without);
  }
  // A model from a folder has a tokenizer of its own; "bytes" is the preset's word about its own model.
  const auto is_of_preset = [&](std::string_view path) { return resolved.origin(path) == origin; };
  if (resolved.config.model.from && !is_of_preset("model.from") && is_of_preset("data.tokenizer")) {
    std::erase_if(settings, [](const Setting& setting) { return setting.path == "data.tokenizer"; });
    Faults none;
    resolved = assigned(settings, none);
    notes.push_back("data.tokenizer of " + origin + " is left out: it is for the preset's model, and " +
                    resolved.origin("model.from") + " names another.");
  }
  resolved.notes = std::move(notes);
}

}  // namespace

ResolvedConfig resolve_config(const ConfigSources& sources) {
  Faults faults;
  std::vector<Setting> settings = config::settings_of(sources, faults);
  ResolvedConfig resolved = assigned(settings, faults);
  // Values that were refused would contradict others for no fault of theirs.
  faults.throw_if_any();
  if (sources.preset) leave_out_of_preset(*sources.preset, settings, resolved);
  for (const Contradiction& each : config::contradictions(resolved)) {
    const std::string origin = resolved.origin(each.path);
    faults.add(origin == "default" ? "configuration" : origin, each.path, " ", each.why);
  }
  config::check_size(resolved.config, faults);
  faults.throw_if_any();
  return resolved;
}

namespace {

std::vector<std::string> texts_of(const ConfigField& field) {
  if (auto* const* list = std::get_if<std::vector<std::string>*>(&field)) return **list;
  auto* const* text = std::get_if<std::optional<std::string>*>(&field);
  return text && **text ? std::vector{***text} : std::vector<std::string>();
}

}  // namespace

void check_paths(const ResolvedConfig& resolved) {
  config::Faults faults;
  RunConfig config = resolved.config;
  if (config.data.tokenizer == "bytes") config.data.tokenizer.reset();
  for (const ConfigKey& key : config_keys()) {
    if (!key.names_file) continue;
    for (const std::string& path : texts_of(key.field(config))) {
      std::error_code error;
      if (std::filesystem::exists(path, error)) continue;
      const std::string where = std::filesystem::path(path).is_absolute()
                                    ? "."
                                    : " in " + std::filesystem::current_path(error).string() +
                                          ". Paths are relative to the folder in which the command runs.";
      faults.add(resolved.origin(key.path), key.path, ": there is no ", in_quotes(path), where);
    }
  }
  faults.throw_if_any();
}

namespace {

using Text = std::optional<std::string>;  // of a value as TOML, if there is one

void add_change(std::vector<std::string>& changes, const std::string& path, const Text& before,
                const Text& now) {
  if (before == now) return;
  const std::string is = now ? " is now " + *now : " is no longer given";
  changes.push_back(path + is + ", was " + before.value_or("not given"));
}

Text rule_text(const std::map<std::string, std::string>& rules, const std::string& op) {
  const auto rule = rules.find(op);
  return rule == rules.end() ? Text() : config::toml_quoted(rule->second);
}

}  // namespace

std::vector<std::string> config_changes(RunConfig before, RunConfig now) {
  std::vector<std::string> changes;
  for (const ConfigKey& key : config_keys()) {
    const std::string path(key.path);
    if (path != config::kOpsPath) {
      add_change(changes, path, config::toml_text(key.field(before)), config::toml_text(key.field(now)));
      continue;
    }
    std::set<std::string> ops;
    for (const auto* rules : {&before.precision.ops, &now.precision.ops})
      for (const auto& [op, rule] : *rules) ops.insert(op);
    for (const std::string& op : ops)
      add_change(changes, path + "." + config::toml_key(op), rule_text(before.precision.ops, op),
                 rule_text(now.precision.ops, op));
  }
  return changes;
}

}  // namespace halfstep
