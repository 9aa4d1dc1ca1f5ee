// Chat templates: from a conversation to the text that a model reads. Knows no Torch.
#pragma once

#include <halfstep/config.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace halfstep {

/// What one side of a conversation says.
struct ChatMessage {
  std::string role;  ///< "system", "user", "assistant", or what else the template knows
  std::string content;
};

/// Turns a conversation into text exactly as transformers' `apply_chat_template(..., tokenize=False)` does
/// (tests/text/chat_template_oracle.py compares them), without Python.
///
///     const auto chat = halfstep::ChatTemplate::from_folder("SmolLM2-135M-Instruct");
///     const std::vector<halfstep::ChatMessage> messages{{"user", "What is half a step?"}};
///     const std::string prompt = chat->render(messages, true);
///
/// The text has all special tokens that the template writes, the first one too: encode it as it is.
///
/// A template is a program in Jinja, and comes with the model, from the internet. What it may use is bounded:
/// 1 MiB of template, 64 levels of nesting, 2^24 steps, 64 MiB of text, no file, no network. It sees the
/// messages, the special tokens and the date; `tools` and `documents` are none.
///
/// An Error begins with where the template is from and its line. It is thrown by the constructors for what is
/// not supported, by name, and by `render` for what the template refuses (`raise_exception`: roles that do
/// not alternate, say).
///
/// A handle: copies share the template. Safe to use from many threads at once.
class HALFSTEP_API ChatTemplate {
 public:
  /// Of a Hugging Face folder: chat_template.jinja, or else `chat_template` of tokenizer_config.json; nothing
  /// if it has none. Special tokens are those of tokenizer_config.json and special_tokens_map.json.
  static std::optional<ChatTemplate> from_folder(const std::filesystem::path& folder);
  /// A template of one's own, with the special tokens of a folder.
  static ChatTemplate from_file(const std::filesystem::path& jinja, const std::filesystem::path& folder);

  /// `special_tokens` are variables of the template: "bos_token", "eos_token", ... `where` begins the
  /// messages of errors.
  explicit ChatTemplate(std::string_view jinja, std::map<std::string, std::string> special_tokens = {},
                        std::string where = "chat template");

  /// With `add_generation_prompt` the text ends where an answer of the assistant begins.
  std::string render(std::span<const ChatMessage> messages, bool add_generation_prompt) const;

  /// The token that ends a text; not always the one that ends an answer.
  std::optional<std::string> eos_token() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace halfstep
