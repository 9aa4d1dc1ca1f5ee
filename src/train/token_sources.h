// The token files that a run reads: those that it was given, and those that it makes of text.
#pragma once

#include <halfstep/run_config.h>
#include <halfstep/token_file.h>
#include <halfstep/tokenizer.h>

#include <filesystem>
#include <vector>

namespace halfstep::train {

struct TokenSources {
  std::vector<std::filesystem::path> train, validation;
};

struct TokenOptions {
  std::string tokenizer_text{};  ///< its file, if it has one
  int64_t most_text_bytes = 0;   ///< of training and of held-out text, each; 0: all
};

bool is_token_file(const std::filesystem::path& path);

/// Files whose names end in .bin or .tokens are token files and taken as they are. All others are text, and
/// of folders every file in them that is not hidden, in the order of their names; what is no text is refused.
/// They are encoded, one document after the other with the tokenizer's <|endoftext|> between them if it has
/// one, into `folder`/train.tokens and validation.tokens.
///
/// data.validation_fraction holds out whole documents, spread evenly; of a single one its last part.
///
/// A token file that is there already, made of the same text by the same tokenizer, is taken as it is.
TokenSources prepare_tokens(const RunConfig::Data& data, const Tokenizer& tokenizer,
                            const std::filesystem::path& folder, const TokenOptions& options = {});

}  // namespace halfstep::train
