// Tokenizers: from text to ids and back. Knows no Torch.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// What `encode` does with a byte for which the vocabulary has no token. Byte-level vocabularies have all
/// 256, with exceptions: SmolLM2's lacks 21, bytes that occur in rare scripts or in no valid UTF-8.
enum class MissingBytes : uint8_t {
  Refuse,  ///< an Error that names the byte
  Drop,    ///< left out, as the package `tokenizers` does; `TokenStream` counts them
};

/// How a Tokenizer treats what its vocabulary lacks.
struct TokenizerOptions {
  MissingBytes missing_bytes = MissingBytes::Refuse;
};

/// Cuts text into tokens exactly as Hugging Face's `tokenizers` does (`encode` with add_special_tokens=False;
/// tools/tokenizer_parity compares them), and puts tokens together again.
///
/// Byte-level byte-pair encodings: GPT-2, Llama-3, SmolLM2, Qwen2, Qwen3, Mistral's Tekken and their kin.
/// What a file asks for that is not known here is refused by name; nothing in it is ignored but what puts
/// special tokens around a text.
///
/// Bytes that are not valid UTF-8 are each cut by themselves, so `decode(encode(x)) == x` for any bytes, if
/// the vocabulary has all 256. A tokenizer that normalizes (Qwen's: NFC) gives back the normalized text.
///
/// A word of more than 64 MiB (a file of zeros is one) is refused with its offset in the normalized text:
/// merging it would take up to 60 times as much memory.
///
/// A handle: copies share the vocabulary. Safe to use from many threads at once.
class HALFSTEP_API Tokenizer {
 public:
  /// Ids 0 to 255, one a byte.
  static Tokenizer bytes();
  /// Hugging Face's tokenizer.json.
  static Tokenizer from_file(const std::filesystem::path& path, const TokenizerOptions& options = {});
  /// The contents of a tokenizer.json; `where` begins the messages of errors.
  static Tokenizer from_json(std::string_view text, const std::string& where,
                             const TokenizerOptions& options = {});
  /// GPT-2's vocab.json and merges.txt.
  static Tokenizer from_gpt2(const std::filesystem::path& vocabulary, const std::filesystem::path& merges,
                             const TokenizerOptions& options = {});

  /// The ids of a text.
  std::vector<int32_t> encode(std::string_view text) const;
  /// Appends to `ids`.
  void encode(std::string_view text, std::vector<int32_t>& ids) const;

  /// The bytes that the tokens stand for, special ones too. An id outside the vocabulary is an Error.
  std::string decode(std::span<const int32_t> ids) const;

  /// The largest id plus one: the rows that an embedding needs.
  int64_t vocabulary_size() const;
  /// The token that stands for these bytes: " the", "<|endoftext|>".
  std::optional<int32_t> id_of(std::string_view token) const;

 private:
  friend class TokenStream;
  struct State;
  explicit Tokenizer(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

/// Encodes a text that arrives in parts, with the ids of the whole: a part may end anywhere, even inside a
/// character. Keeps back only what the next part could change: the last word, as a rule. (With
/// `add_prefix_space` in tokenizer.json it keeps all up to the next added token or digit.) A word of more
/// than 64 MiB is refused with its offset.
class HALFSTEP_API TokenStream {
 public:
  explicit TokenStream(Tokenizer tokenizer);

  /// Appends to `ids` what is certain.
  void feed(std::string_view part, std::vector<int32_t>& ids);
  /// The text ends here; another may follow.
  void finish(std::vector<int32_t>& ids);

  /// Bytes left out so far for want of a token.
  uint64_t dropped_bytes() const { return dropped_bytes_; }

 private:
  void encode(bool open, std::vector<int32_t>& ids);
  size_t kept_back() const { return pending_.size() + normalized_.size(); }

  Tokenizer tokenizer_;
  std::string normalized_;    ///< the beginning of a word, in its normalized form
  std::string pending_;       ///< the text behind it
  size_t enough_ = 0;         ///< bytes to have before it is worth scanning again
  uint64_t text_offset_ = 0;  ///< of what is kept back, in the normalized text
  uint64_t dropped_bytes_ = 0;
};

}  // namespace halfstep
