// `halfstep generate`: a model goes on with a text.
#include <halfstep/chat_template.h>
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/number_checks.h"
#include "cli/open_model.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

struct GenerateRequest {
  std::string model, precision = "fp32", prompt, system;
  GenerateOptions options{.tokens = 128};
  bool chat = false, no_cache = false, json = false;
};

/// The tokens that end a text, as generation_config.json or config.json names them: a number or a list.
std::vector<int64_t> ends_of(const OpenModel& opened) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    std::ifstream file(opened.folder / name);
    const auto fields = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (!fields.is_object() || !fields.contains("eos_token_id")) continue;
    const nlohmann::json& ends = fields["eos_token_id"];
    if (ends.is_number_integer()) return {ends.get<int64_t>()};
    std::vector<int64_t> all;
    if (ends.is_array())
      for (const nlohmann::json& end : ends)
        if (end.is_number_integer()) all.push_back(end.get<int64_t>());
    if (!all.empty()) return all;
  }
  return {};
}

/// Text as it grows: what is decoded anew is written, but for a character that is not whole yet.
class Stream {
 public:
  Stream(const Tokenizer& tokenizer, bool silent)
      : tokenizer_(tokenizer), silent_(silent), terminal_(isatty(STDOUT_FILENO) == 1) {}

  void add(int64_t id) {
    const auto one = static_cast<int32_t>(id);
    if (is_known(id)) text_ += tokenizer_.decode({&one, 1});
    write(std::string_view(text_).substr(0, whole_characters(text_)));
  }
  void finish() { write(text_); }
  const std::string& text() const { return text_; }

 private:
  /// A model may have more numbers than there are tokens.
  bool is_known(int64_t id) const {
    if (id >= tokenizer_.vocabulary_size()) return false;
    const auto one = static_cast<int32_t>(id);
    try {
      (void)tokenizer_.decode({&one, 1});
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  static std::size_t whole_characters(const std::string& text) {
    constexpr std::size_t kMostBytes = 4;
    for (std::size_t back = 1; back <= std::min(kMostBytes, text.size()); ++back) {
      const auto byte = static_cast<unsigned char>(text[text.size() - back]);
      if ((byte & 0xC0) == 0x80) continue;  // inside a character
      const std::size_t needed = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
      return needed > back ? text.size() - back : text.size();
    }
    return text.size();
  }

  /// A model may write anything, the codes of a terminal too.
  void write(std::string_view text) {
    if (silent_ || text.size() <= written_) return;
    std::string_view anew = text.substr(written_);
    written_ = text.size();
    if (!terminal_) {
      std::cout << anew << std::flush;
      return;
    }
    while (!anew.empty()) {
      const std::size_t end = anew.find('\n');
      std::cout << printable(anew.substr(0, end), Unprintable::Replaced);
      if (end == anew.npos) break;
      std::cout << "\n";
      anew.remove_prefix(end + 1);
    }
    std::cout << std::flush;
  }

  const Tokenizer& tokenizer_;
  bool silent_, terminal_;
  std::string text_;
  std::size_t written_ = 0;
};

/// What a model wrote behind a text.
struct Answer {
  std::vector<int32_t> given;
  std::vector<int64_t> ids;
  std::string text;
  double seconds = 0;
  double tokens_per_second() const { return static_cast<double>(ids.size()) / seconds; }
};

Answer go_on(OpenModel& opened, const GenerateRequest& request, const std::string& text,
             const std::vector<int64_t>& ends) {
  Answer answer{.given = opened.tokenizer.encode(text), .ids = {}, .text = ""};
  GenerateOptions options = request.options;
  options.context = opened.model->shape().context;
  options.cache = !request.no_cache;
  options.ends = ends;
  if (const auto left_out = std::ssize(answer.given) - options.context; left_out > 0)
    std::cerr << "halfstep: the prompt has " << with_commas(std::ssize(answer.given))
              << " tokens and the model was made for " << with_commas(options.context) << ": the first "
              << with_commas(left_out) << " are left out\n";
  Stream stream(opened.tokenizer, /*silent=*/request.json);
  options.each_token = [&](int64_t id) { stream.add(id); };
  const auto begin = std::chrono::steady_clock::now();
  answer.ids = opened.precision.forward(
      [&] { return generate(*opened.model, {answer.given.begin(), answer.given.end()}, options); });
  answer.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  stream.finish();
  answer.text = stream.text();
  return answer;
}

void tell_pace(const Answer& answer) {
  std::cout << std::endl;
  std::cerr << "halfstep: " << answer.ids.size() << " tokens, " << digits(answer.tokens_per_second(), 3)
            << " a second\n";
}

void print(const GenerateRequest& request, const std::string& prompt, const Answer& answer) {
  if (!request.json) return tell_pace(answer);
  print_answer({{"prompt", prompt},
                {"prompt_ids", answer.given},
                {"ids", answer.ids},
                {"text", answer.text},
                {"seconds", answer.seconds},
                {"tokens_per_second", answer.tokens_per_second()}});
}

ChatTemplate chat_of(const OpenModel& opened) {
  auto chat = ChatTemplate::from_folder(opened.folder);
  HALFSTEP_CHECK(chat, opened.folder.string(),
                 " has no chat template: it was not made for conversations. Leave --chat out, or put its "
                 "chat_template.jinja there.");
  return *std::move(chat);
}

/// One turn for --prompt; without it a turn for each line that is typed.
void talk(const GenerateRequest& request, OpenModel& opened) {
  const ChatTemplate chat = chat_of(opened);
  std::vector<int64_t> ends = ends_of(opened);
  if (const auto& end = chat.eos_token())
    if (const auto id = opened.tokenizer.id_of(*end)) ends.push_back(*id);
  std::vector<ChatMessage> messages;
  if (!request.system.empty()) messages.push_back({.role = "system", .content = request.system});
  const auto turn = [&](const std::string& said) {
    messages.push_back({.role = "user", .content = said});
    const std::string prompt = chat.render(messages, /*add_generation_prompt=*/true);
    const Answer answer = go_on(opened, request, prompt, ends);
    messages.push_back({.role = "assistant", .content = answer.text});
    print(request, prompt, answer);
  };
  if (!request.prompt.empty()) return turn(request.prompt);
  if (request.json) throw ExitWith(kUsage, "--json answers one --prompt. Give it.");
  const bool typed = isatty(STDIN_FILENO) == 1;
  for (std::string line;;) {
    if (typed) std::cerr << "> " << std::flush;
    if (!std::getline(std::cin, line)) break;
    if (!line.empty()) turn(line);
  }
}

void write_text(GenerateRequest request) {
  if (request.prompt.empty() && !request.chat)
    throw ExitWith(kUsage,
                   "--prompt is empty. Give at least one character, or - to read it from standard input.");
  if (!request.system.empty() && !request.chat)
    throw ExitWith(kUsage, "--system is for conversations. Add --chat.");
  if (request.prompt == "-") {
    request.prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
    if (request.prompt.empty()) throw ExitWith(kUsage, "--prompt - found nothing on standard input.");
  }
  OpenModel opened = open_model(request.model, request.precision);
  if (request.chat) return talk(request, opened);
  print(request, request.prompt, go_on(opened, request, request.prompt, ends_of(opened)));
}

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("generate", "Continue a text");
  auto request = std::make_shared<GenerateRequest>();
  command->add_option("MODEL", request->model, std::string("A Hugging Face folder, or the folder of a run"))
      ->required()
      ->type_name("DIR");
  command
      ->add_option("--prompt", request->prompt, std::string("The text to continue; - reads standard input"))
      ->type_name("TEXT");
  command->add_flag("--chat", request->chat,
                    std::string("Answer the prompt with the model's chat template; without --prompt "
                                "each line of standard input"));
  command->add_option("--system", request->system, std::string("With --chat: how to answer"))
      ->type_name("TEXT");
  const auto number = [&](const char* name, auto& value, const char* about, const CLI::Validator& check) {
    command->add_option(name, value, std::string(about))->type_name("N")->check(check)->capture_default_str();
  };
  constexpr double kMost = 1e9;
  const CLI::Validator count = number_from(0, kMost, "a whole number from 0 to 1,000,000,000");
  number("--tokens", request->options.tokens, "How many at most",
         number_from(1, kMost, "a whole number from 1 to 1,000,000,000"));
  number("--temperature", request->options.temperature, "0: always the likeliest token",
         number_from(0, kMost, "a number of 0 or more"));
  number("--top-k", request->options.top_k, "Only so many of the likeliest tokens; 0: all", count);
  number("--top-p", request->options.top_p, "Only the likeliest, of this probability together",
         number_from(1e-9, 1, "a probability above 0 and up to 1"));
  number("--seed", request->options.seed, "Another one, another text", count);
  command->add_option("--precision", request->precision, std::string("fp32, bf16, mxfp8, ..."))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_flag("--no-cache", request->no_cache,
                    std::string("Recompute all for each token: slow, to compare"));
  command->add_flag("--json", request->json, std::string("As JSON, with the ids"));
  command->callback([request] { about_files([&] { write_text(*request); }); });
}

}  // namespace halfstep::cli
