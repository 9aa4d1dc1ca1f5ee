// The token files that a run reads: those that it was given, and those that it makes of text.
#pragma once

#include <halfstep/chat_template.h>
#include <halfstep/run_config.h>
#include <halfstep/token_file.h>
#include <halfstep/tokenizer.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace halfstep::train {

struct TokenSources {
  std::vector<std::filesystem::path> train, validation;
  /// Of instruction data: how many, in how many sequences, what was cut or left out, for people.
  std::string examples{}, held_out_examples{};
  /// With TokenOptions::most_text_bytes: "the first 4 MiB of text", where there was more; otherwise empty.
  std::string only{};
};

struct TokenOptions {
  std::string tokenizer_text{};        ///< its file, if it has one
  std::optional<ChatTemplate> chat{};  ///< for instruction data with messages
  std::string chat_text{};             ///< its file
  std::optional<int32_t> end{};        ///< behind each completion; nothing: <|endoftext|>, if there is one
  int64_t most_text_bytes = 0;         ///< of training and of held-out text, each; 0: all
  /// A run with checkpoints goes on with the tokens it has: others are refused, and its file is left alone.
  bool has_checkpoints = false;
  bool only_read = false;  ///< another process has made all token files
};

bool is_token_file(const std::filesystem::path& path);

/// Files whose names end in .bin or .tokens are token files and taken as they are. All others are text
/// (text_files.h), a document each; in JSON Lines each line is one. They are encoded, one document after the
/// other with the tokenizer's <|endoftext|> between them if it has one, into `folder`/train.tokens and
/// validation.tokens.
///
/// Lines with prompts and completions or with messages are examples: they are put side by side into sequences
/// of data.sequence_length tokens, with marks for what is given and where one begins.
///
/// data.validation_fraction holds out whole documents, spread evenly; where no whole one is small enough, the
/// last part of the largest text, or the last line.
///
/// A token file that is there already, made of the same text by the same tokenizer, is taken as it is.
TokenSources prepare_tokens(const RunConfig::Data& data, const Tokenizer& tokenizer,
                            const std::filesystem::path& folder, const TokenOptions& options = {});

}  // namespace halfstep::train
