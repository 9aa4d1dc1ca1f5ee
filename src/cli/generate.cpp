// `halfstep generate`: a model goes on with a text.
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/open_model.h"

namespace halfstep::cli {
namespace {

struct Request {
  std::string model, precision = "fp32", prompt;
  GenerateOptions options{.tokens = 128};
  bool no_cache = false, json = false;
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
    if (is_known(id)) ids_.push_back(static_cast<int32_t>(id));
    const std::string text = tokenizer_.decode(ids_);
    write(std::string_view(text).substr(0, whole_characters(text)));
  }
  void finish() { write(text()); }
  std::string text() const { return tokenizer_.decode(ids_); }

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
  std::vector<int32_t> ids_;
  std::size_t written_ = 0;
};

void write_text(const Request& request) {
  OpenModel opened = open_model(request.model, request.precision);
  std::string prompt = request.prompt;
  if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  const std::vector<int32_t> given = opened.tokenizer.encode(prompt);
  if (given.empty())
    throw ExitWith(kUsage,
                   "--prompt is empty. Give at least one character, or - to read it from standard input.");
  GenerateOptions options = request.options;
  options.context = opened.model->shape().context;
  options.cache = !request.no_cache;
  options.ends = ends_of(opened);
  Stream stream(opened.tokenizer, /*silent=*/request.json);
  options.each_token = [&](int64_t id) { stream.add(id); };
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int64_t> ids = opened.precision.forward(
      [&] { return generate(*opened.model, {given.begin(), given.end()}, options); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (request.json)
    return print_answer({{"prompt_ids", given},
                         {"ids", ids},
                         {"text", stream.text()},
                         {"seconds", seconds},
                         {"tokens_per_second", static_cast<double>(ids.size()) / seconds}});
  stream.finish();
  std::cout << std::endl;
  std::cerr << "halfstep: " << ids.size() << " tokens, " << static_cast<double>(ids.size()) / seconds
            << " a second\n";
}

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("generate", "Go on with a text");
  auto request = std::make_shared<Request>();
  command->add_option("MODEL", request->model, std::string("A Hugging Face folder, or the folder of a run"))
      ->required()
      ->type_name("DIR");
  command
      ->add_option("--prompt", request->prompt, std::string("What it goes on with; - reads standard input"))
      ->required()
      ->type_name("TEXT");
  const auto number = [&](const char* name, auto& value, const char* about, const CLI::Range& range) {
    command->add_option(name, value, std::string(about))->type_name("N")->check(range)->capture_default_str();
  };
  constexpr double kMost = 1e9;
  number("--tokens", request->options.tokens, "How many at most", CLI::Range(1.0, kMost));
  number("--temperature", request->options.temperature, "0: always the likeliest token",
         CLI::Range(0.0, kMost));
  number("--top-k", request->options.top_k, "Only so many of the likeliest tokens; 0: all",
         CLI::Range(0.0, kMost));
  number("--top-p", request->options.top_p, "Only the likeliest, of this probability together",
         CLI::Range(1e-9, 1.0));
  number("--seed", request->options.seed, "Another one, another text", CLI::Range(0.0, kMost));
  command->add_option("--precision", request->precision, std::string("fp32, bf16, mxfp8, ..."))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_flag("--no-cache", request->no_cache,
                    std::string("Read all again for each token: slow, to compare"));
  command->add_flag("--json", request->json, std::string("As JSON, with the ids"));
  command->callback([request] { about_files([&] { write_text(*request); }); });
}

}  // namespace halfstep::cli
