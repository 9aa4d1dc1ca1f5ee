// `halfstep tokenize`: from text files to a file of token ids.
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <halfstep/token_file.h>
#include <halfstep/tokenizer.h>

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal_text.h"

namespace halfstep::cli {
namespace {

// How far a long command has come, told on the standard error.

/// One line that changes on a terminal; a plain line now and then elsewhere, so that logs stay short.
class Progress {
 public:
  /// `total_bytes` 0: unknown.
  explicit Progress(uint64_t total_bytes);

  void show(uint64_t bytes, uint64_t tokens);
  /// Clears the line on a terminal.
  void finish();
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;

  uint64_t total_bytes_;
  bool terminal_;
  bool shown_ = false;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point last_ = begin_;
};

constexpr double kSecondsOnTerminal = 0.2, kSecondsElsewhere = 10;

double since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

Progress::Progress(uint64_t total_bytes) : total_bytes_(total_bytes), terminal_(isatty(STDERR_FILENO) == 1) {}

double Progress::seconds() const { return since(begin_); }

void Progress::show(uint64_t bytes, uint64_t tokens) {
  if (since(last_) < (terminal_ ? kSecondsOnTerminal : kSecondsElsewhere)) return;
  last_ = Clock::now();
  shown_ = true;
  const double done = static_cast<double>(bytes), rate = done / seconds();
  const char *const begin = terminal_ ? "\r\033[K" : "", *const end = terminal_ ? "" : "\n";
  if (total_bytes_ == 0) {
    std::fprintf(stderr, "%stokenize: %.1f MB, %.3g tokens, %.1f MB/s%s", begin, done / 1e6,
                 static_cast<double>(tokens), rate / 1e6, end);
  } else {
    const double total = static_cast<double>(total_bytes_);
    std::fprintf(stderr, "%stokenize: %.0f%% of %.1f MB, %.3g tokens, %.1f MB/s, %.0f s left%s", begin,
                 100 * done / total, total / 1e6, static_cast<double>(tokens), rate / 1e6,
                 std::ceil((total - done) / rate), end);
  }
  std::fflush(stderr);
}

void Progress::finish() {
  if (terminal_ && shown_) std::fputs("\r\033[K", stderr);
}

// A part of a text that is read, encoded and written at a time: memory does not grow with the files.
constexpr size_t kPartBytes = size_t{1} << 20;

struct TokenizeRequest {
  std::string tokenizer, merges, out, end_token;
  std::string format = "nanogpt";
  std::string missing_bytes = "refuse";
  std::vector<std::string> inputs;
};

struct Totals {
  uint64_t bytes = 0;
  uint64_t dropped_bytes = 0;
  uint64_t documents = 0;
};

Tokenizer open_tokenizer(const TokenizeRequest& request) {
  const TokenizerOptions options{request.missing_bytes == "drop" ? MissingBytes::Drop : MissingBytes::Refuse};
  if (request.tokenizer == "bytes") return Tokenizer::bytes();
  if (!request.merges.empty()) return Tokenizer::from_gpt2(request.tokenizer, request.merges, options);
  const std::filesystem::path path(request.tokenizer);
  return Tokenizer::from_file(std::filesystem::is_directory(path) ? path / "tokenizer.json" : path, options);
}

TokenFormat format_for(const TokenizeRequest& request, int64_t vocabulary_size) {
  const bool narrow = vocabulary_size <= int64_t{1} << 16;
  if (request.format == "llmc") return narrow ? TokenFormat::Llmc16 : TokenFormat::Llmc32;
  return narrow ? TokenFormat::Raw16 : TokenFormat::Raw32;
}

/// Of all inputs; 0 if one of them is not a file, so that nobody can know.
uint64_t bytes_to_come(const std::vector<std::string>& inputs) {
  uint64_t total = 0;
  for (const std::string& input : inputs) {
    std::error_code fault;
    const bool regular = input != "-" && std::filesystem::is_regular_file(input, fault);
    if (!regular) return 0;
    total += std::filesystem::file_size(input, fault);
  }
  return total;
}

void encode_document(std::istream& in, const std::string& name, const Tokenizer& tokenizer,
                     TokenFileWriter& out, Totals& totals, Progress& progress) {
  TokenStream stream(tokenizer);
  std::string part(kPartBytes, '\0');
  std::vector<int32_t> ids;
  try {
    while (in.read(part.data(), static_cast<std::streamsize>(part.size())), in.gcount() > 0) {
      const auto bytes = static_cast<size_t>(in.gcount());
      stream.feed(std::string_view(part).substr(0, bytes), ids);
      out.append(ids);
      ids.clear();
      totals.bytes += bytes;
      progress.show(totals.bytes, static_cast<uint64_t>(out.size()));
    }
    stream.finish(ids);
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    throw Error(
        detail::concat(name, ": in the part before byte ", totals.bytes + kPartBytes, ": ", error.what()));
  }
  HALFSTEP_CHECK(!in.bad(), name, ": cannot be read: ", std::strerror(errno), ".");
  out.append(ids);
  totals.dropped_bytes += stream.dropped_bytes();
  ++totals.documents;
}

void encode_input(const std::string& input, const Tokenizer& tokenizer, TokenFileWriter& out, Totals& totals,
                  Progress& progress) {
  if (input == "-") {
    encode_document(std::cin, "standard input", tokenizer, out, totals, progress);
    return;
  }
  HALFSTEP_CHECK(!std::filesystem::is_directory(input), input, ": is a folder. Give the files in it.");
  std::ifstream file(input, std::ios::binary);
  HALFSTEP_CHECK(file, input, ": cannot open: ", std::strerror(errno), ". Check the path.");
  encode_document(file, input, tokenizer, out, totals, progress);
}

void tell(const TokenizeRequest& request, const Totals& totals, const TokenFileWriter& out,
          TokenFormat format, int64_t vocabulary_size, double seconds, bool json) {
  const double megabytes_per_second = static_cast<double>(totals.bytes) / 1e6 / seconds;
  if (json) {
    const nlohmann::ordered_json answer = {{"out", request.out},
                                           {"format", to_string(format)},
                                           {"tokens", out.size()},
                                           {"documents", totals.documents},
                                           {"bytes", totals.bytes},
                                           {"dropped_bytes", totals.dropped_bytes},
                                           {"vocabulary_size", vocabulary_size},
                                           {"seconds", seconds},
                                           {"mb_per_s", megabytes_per_second}};
    print_answer(answer);
    return;
  }
  std::cout << printable(request.out, Unprintable::Escaped) << ": " << out.size() << " tokens ("
            << to_string(format) << ") from " << totals.bytes << " bytes in " << totals.documents
            << " document(s)\n";
  if (totals.dropped_bytes > 0)
    std::cout << totals.dropped_bytes << " bytes were left out: the vocabulary has no token for them\n";
}

void run_tokenize(const TokenizeRequest& request, bool json) {
  const Tokenizer tokenizer = open_tokenizer(request);
  const int64_t vocabulary_size = tokenizer.vocabulary_size();
  const TokenFormat format = format_for(request, vocabulary_size);
  std::vector<int32_t> end;
  if (!request.end_token.empty()) {
    const auto id = tokenizer.id_of(request.end_token);
    HALFSTEP_CHECK(id, "--end-token '", request.end_token, "': ", request.tokenizer, " has no such token.");
    end.push_back(*id);
  }
  keep_answer_out_of(request.out);
  TokenFileWriter out(request.out, format, vocabulary_size);
  Totals totals;
  Progress progress(bytes_to_come(request.inputs));
  for (const std::string& input : request.inputs) {
    encode_input(input, tokenizer, out, totals, progress);
    out.append(end);
  }
  out.commit();
  progress.finish();
  tell(request, totals, out, format, vocabulary_size, progress.seconds(), json);
}

}  // namespace

void add_tokenize(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("tokenize", "From text files to a file of token ids");
  auto request = std::make_shared<TokenizeRequest>();
  command->add_option("--tokenizer", request->tokenizer, "tokenizer.json, its folder, or 'bytes'")
      ->required()
      ->type_name("FILE");
  command->add_option("--merges", request->merges, "merges.txt, where --tokenizer is GPT-2's vocab.json")
      ->type_name("FILE");
  command->add_option("--out", request->out, "The file of ids to write")->required()->type_name("FILE");
  command->add_option("--format", request->format, "Raw ids, or llm.c's header before them [nanogpt]")
      ->check(CLI::IsMember({"nanogpt", "llmc"}))
      ->type_name("nanogpt|llmc");
  command->add_option("--end-token", request->end_token, "Put after each document: <|endoftext|>")
      ->type_name("TOKEN");
  command
      ->add_option("--missing-bytes", request->missing_bytes,
                   "What has no token is refused or left out [refuse]")
      ->check(CLI::IsMember({"refuse", "drop"}))
      ->type_name("refuse|drop");
  CLI::Option* const json = add_switch(*command, "--json", "The answer as JSON");
  command->add_option("FILES", request->inputs, "Texts, each a document; '-' is the standard input")
      ->required();
  command->callback([request, json] { about_files([&] { run_tokenize(*request, json->count() > 0); }); });
}

}  // namespace halfstep::cli
