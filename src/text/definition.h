// What a tokenizer is, whichever file it came from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/keyed_hash.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pattern.h"

namespace halfstep::text {

/// One step of cutting text into words.
struct Stage {
  enum class Kind { Digits, Split, ByteLevel };
  Kind kind{};
  bool digits_one_by_one = false;
  bool add_prefix_space = false;
  std::shared_ptr<const Pattern> pattern{};  ///< null: the piece stays whole
};

struct Definition {
  std::vector<std::optional<std::string>> bytes_of_id;  ///< nothing where the ids have a gap
  TextMap<int32_t> id_of_bytes;                         ///< of the vocabulary's tokens
  TextMap<int32_t> id_of_added;                         ///< of added tokens
  BpeModel model;
  bool whole_words_first = false;  ///< `ignore_merges`: a word that is a token is that token
  AddedTokens first_added;         ///< looked for first: not `normalized`
  AddedTokens second_added;        ///< looked for in what is left
  std::vector<Stage> stages;       ///< none: each byte is a token
};

/// ids 0 to 255.
Definition bytes_definition();

/// tokenizer.json. Refuses what it does not know, by name and place: a tokenizer that is nearly right gives a
/// model nearly the right tokens.
Definition read_tokenizer_json(const std::filesystem::path& path);
Definition parse_tokenizer_json(std::string_view text, const std::string& where);

/// GPT-2's vocab.json and merges.txt.
Definition read_gpt2_files(const std::filesystem::path& vocabulary, const std::filesystem::path& merges);

}  // namespace halfstep::text
