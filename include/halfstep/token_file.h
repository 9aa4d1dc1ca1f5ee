// Files of token ids, as nanoGPT and llm.c write them: memory-mapped, checked, written durably. Knows no
// Torch.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

namespace halfstep {

/// How the ids stand in a file. All little-endian.
enum class TokenFormat : uint8_t {
  Raw16,     ///< 16 bits an id and nothing else: nanoGPT's .bin
  Raw32,     ///< 32 bits an id and nothing else
  Llmc16,    ///< llm.c's for GPT-2: 256 words of header (20240520, version 1, count), then 16 bits an id
  Llmc32,    ///< llm.c's for Llama-3: the same with 20240801, version 7 and 32 bits an id
  Marked32,  ///< such a header with 20261118, version 1; then 30 bits an id and two marks (TokenMarks)
};

/// What a file of `marked32` says of a token beside its id.
struct TokenMarks {
  bool begins_text = false;  ///< nothing before it belongs to its text
  bool is_given = false;     ///< not to be learned: a prompt, or what fills a sequence up
  bool operator==(const TokenMarks&) const = default;
};

/// "raw16", "raw32", "llmc16", "llmc32", "marked32".
HALFSTEP_API std::string_view to_string(TokenFormat format);
HALFSTEP_API int bytes_per_token(TokenFormat format);

/// When the ids are compared with the vocabulary. `read` compares those that it gives out in either case.
enum class TokenCheck : uint8_t {
  AtOpen,  ///< all of them at once, so that a bad one is found before the training begins
  OnRead,  ///< for files too large to be read through first
};

/// What a TokenFile expects of its file.
struct TokenFileOptions {
  int64_t vocabulary_size = 0;  ///< ids from here on are refused; must be given
  /// Nothing: llm.c's header where there is one, otherwise raw, with 16 bits if the vocabulary fits into
  /// them.
  std::optional<TokenFormat> format{};
  TokenCheck check = TokenCheck::AtOpen;
};

/// A file of ids. An id outside the vocabulary is an Error that says which and where, before it can reach an
/// embedding; so is a length or a header that does not fit.
class HALFSTEP_API TokenFile {
 public:
  explicit TokenFile(const std::filesystem::path& path, const TokenFileOptions& options);
  ~TokenFile();
  TokenFile(TokenFile&&) noexcept;
  TokenFile& operator=(TokenFile&&) noexcept;

  int64_t size() const;  ///< ids in the file
  TokenFormat format() const;
  const std::filesystem::path& path() const;

  /// Fills `ids` with those from `first` on. A FileError if the file was cut short since it was opened.
  void read(int64_t first, std::span<int64_t> ids) const;
  /// The same, with the marks of each, where the format has them.
  void read(int64_t first, std::span<int64_t> ids, std::span<TokenMarks> marks) const;

  /// A number made of every id: other data has another. Reads the whole file.
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<const State> state_;
};

/// Writes a file of ids, which appears whole when `commit` returns and not at all without it.
class HALFSTEP_API TokenFileWriter {
 public:
  TokenFileWriter(const std::filesystem::path& path, TokenFormat format, int64_t vocabulary_size);
  ~TokenFileWriter();
  TokenFileWriter(TokenFileWriter&&) noexcept;
  TokenFileWriter& operator=(TokenFileWriter&&) noexcept;

  /// Adds ids behind those that are there.
  void append(std::span<const int32_t> ids);
  /// In a format with marks, one for each id.
  void append(std::span<const int32_t> ids, std::span<const TokenMarks> marks);
  int64_t size() const;  ///< ids so far
  /// Puts the file in its place, durably.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace halfstep
