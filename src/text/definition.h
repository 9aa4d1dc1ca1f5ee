// What a tokenizer is, whichever file it came from, and how one is put together.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/keyed_hash.h"
#include "text/bpe.h"
#include "text/pattern.h"

namespace halfstep::text {

// GPT-2's alphabet: a printable character for each of the 256 bytes, so that vocabularies of byte strings can
// be written as text.

/// The character of each byte, as UTF-8: a printable Latin-1 character stands for itself, the other 68 bytes
/// are numbered from U+0100 on.
const std::array<std::string, 256>& byte_characters();

/// The bytes that a token of the vocabulary stands for; nothing when it has a character outside the alphabet.
std::optional<std::string> bytes_of_token(std::string_view token);

/// Tokens that are looked for in the text itself, before it is cut into words: <|endoftext|>. Finds the
/// leftmost and, of those that begin there, the longest.
class AddedTokens {
 public:
  struct Found {
    size_t begin = 0;
    size_t end = 0;
    int32_t id = kNoToken;  ///< kNoToken: none; `begin` is where the search ended
  };

  void add(std::string_view token, int32_t id);
  bool empty() const { return longest_ == 0; }

  /// From `from` on. With `open`, text may follow: the search ends where a token could begin that what
  /// follows decides.
  Found find(std::string_view text, size_t from, bool open) const;

 private:
  std::unordered_map<uint64_t, uint32_t> next_;  // of (node, byte), nodes being prefixes of tokens
  std::vector<int32_t> id_of_node_ = {kNoToken};
  std::array<bool, 256> begins_{};
  size_t longest_ = 0;
};

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
  bool nfc = false;                ///< what is left is brought into Unicode's form NFC
  AddedTokens second_added;        ///< looked for in that
  std::vector<Stage> stages;       ///< none: each byte is a token
};

/// A Definition from a vocabulary, its merges and its added tokens, each checked as it comes.
class DefinitionBuilder {
 public:
  /// `where` begins every message: the path of the file. With `nfc`, added tokens that are `normalized` are
  /// looked for in the form NFC.
  explicit DefinitionBuilder(std::string where, bool nfc = false) : where_(std::move(where)), nfc_(nfc) {}

  /// As the file writes it: in GPT-2's alphabet of bytes. An id twice or out of range is refused.
  void add_to_vocabulary(const std::string& token, int64_t id);
  /// A merge that names no token is refused; one that stands twice, by `build`.
  void add_merge(std::string_view left, std::string_view right);
  void add_added_token(const std::string& content, int64_t id, bool normalized);

  bool has_every_byte() const;
  bool has(const std::string& token) const { return id_of_token_.contains(token); }

  /// The vocabulary, merges and added tokens; stages are the caller's.
  Definition build();

 private:
  int32_t id_in_vocabulary(std::string_view token, std::string_view of_what) const;
  void check_merges_differ() const;
  void set_bytes(int32_t id, std::string bytes);

  std::string where_;
  bool nfc_;
  TextMap<int32_t> id_of_token_;
  std::vector<std::optional<std::string>> bytes_of_id_;
  std::vector<Merge> merges_;
  TextMap<int32_t> id_of_added_;
  int64_t last_added_ = -1;
  size_t added_bytes_ = 0;
  AddedTokens first_added_, second_added_;
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
