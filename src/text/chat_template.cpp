#include <halfstep/chat_template.h>
#include <halfstep/error.h>

#include <utility>
#include <vector>

#include "io/input_file.h"
#include "io/json.h"
#include "io/json_place.h"
#include "jinja/template.h"

namespace halfstep {

struct ChatTemplate::State {
  jinja::Template parsed;
  std::map<std::string, std::string> special_tokens;
};

namespace {

using files::JsonPlace;
using Tokens = std::map<std::string, std::string>;

std::string text_of(const std::filesystem::path& path) {
  const files::MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// What transformers 5 hands to a template: every key that ends with "_token", and the named ones of
// "extra_special_tokens".
void read_tokens(const JsonPlace& file, Tokens& tokens) {
  for (const auto& [key, token] : file.fields()) {
    if (key == "extra_special_tokens" && token.value().is_object()) read_tokens(token, tokens);
    if (!key.ends_with("_token")) continue;
    if (token.value().is_string()) tokens[key] = token.text();
    if (token.value().is_object()) tokens[key] = token.at("content").text();
  }
}

// "chat_template": a text, or texts with names, of which "default" is for conversations without tools.
std::optional<std::string> template_of(const JsonPlace& file) {
  const JsonPlace place = file.at("chat_template");
  if (place.is_null()) return std::nullopt;
  if (!place.value().is_array()) return place.text();
  for (const JsonPlace& named : place.elements())
    if (named.at("name").text() == "default") return named.at("template").text();
  detail::throw_error(detail::concat(place.where(), ": has no template with the name 'default'."));
}

/// What the files beside a tokenizer say.
struct FolderConfig {
  Tokens tokens{};
  std::optional<std::string> jinja{};
};

FolderConfig read_folder(const std::filesystem::path& folder) {
  const std::filesystem::path config = folder / "tokenizer_config.json",
                              map = folder / "special_tokens_map.json";
  FolderConfig found;
  bool lists_added_tokens = false;
  if (std::filesystem::exists(config)) {
    const auto parsed = files::read_json(text_of(config), config.string());
    const JsonPlace file(parsed, config.string());
    read_tokens(file, found.tokens);
    found.jinja = template_of(file);
    lists_added_tokens = file.has("added_tokens_decoder");
  }
  // As transformers 5 does: beside a newer tokenizer_config.json the older file is not read.
  if (!lists_added_tokens && std::filesystem::exists(map)) {
    const auto parsed = files::read_json(text_of(map), map.string());
    read_tokens(JsonPlace(parsed, map.string()), found.tokens);
  }
  return found;
}

}  // namespace

std::optional<ChatTemplate> ChatTemplate::from_folder(const std::filesystem::path& folder) {
  if (const std::filesystem::path jinja = folder / "chat_template.jinja"; std::filesystem::exists(jinja))
    return from_file(jinja, folder);
  FolderConfig config = read_folder(folder);
  if (!config.jinja) return std::nullopt;
  return ChatTemplate(*config.jinja, std::move(config.tokens),
                      (folder / "tokenizer_config.json").string() + ": chat_template");
}

ChatTemplate ChatTemplate::from_file(const std::filesystem::path& jinja,
                                     const std::filesystem::path& folder) {
  return ChatTemplate(text_of(jinja), read_folder(folder).tokens, jinja.string());
}

ChatTemplate::ChatTemplate(std::string_view jinja, std::map<std::string, std::string> special_tokens,
                           std::string where)
    : state_(std::make_shared<const State>(
          State{jinja::Template(jinja, std::move(where)), std::move(special_tokens)})) {}

std::string ChatTemplate::render(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  using namespace jinja;
  HALFSTEP_CHECK(!messages.empty(), state_->parsed.where(), ": a conversation has at least one message.");
  Run run(state_->parsed.where());
  std::vector<Value> list;
  for (const ChatMessage& message : messages) {
    DictBuilder fields(run);
    fields.add(Value::text("role"), Value::text(std::string_view(message.role)));
    fields.add(Value::text("content"), Value::text(std::string_view(message.content)));
    list.push_back(fields.build());
  }
  Template::Variables variables{{"messages", make_list(run, std::move(list))},
                                {"tools", None{}},
                                {"documents", None{}},
                                {"add_generation_prompt", add_generation_prompt}};
  for (const auto& [name, token] : state_->special_tokens)
    variables.emplace_back(name, Value::text(std::string_view(token)));
  return state_->parsed.render(run, variables);
}

std::optional<std::string> ChatTemplate::eos_token() const {
  const auto found = state_->special_tokens.find("eos_token");
  return found == state_->special_tokens.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace halfstep
