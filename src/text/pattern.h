// The patterns by which tokenizers cut text into words, on PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

namespace halfstep::text {

struct Match {
  size_t begin = 0;
  size_t end = 0;
};

/// A pattern by the words in which tokenizer.json has it.
struct KnownPattern {
  std::string_view name;
  std::string_view expression;
};

std::span<const KnownPattern> known_patterns();

enum class Search { Found, None, NeedsMoreText };

/// What a thread needs while it matches.
class MatchScratch {
 public:
  MatchScratch();
  ~MatchScratch();
  MatchScratch(const MatchScratch&) = delete;
  MatchScratch& operator=(const MatchScratch&) = delete;

 private:
  friend class Pattern;
  void* data_;
};

/// A pattern of which it has been shown, on every code point, that PCRE2 cuts as the package `tokenizers`
/// does. Only such patterns are known: another expression in a stranger's file is refused, so none can make
/// matching slow, and none is read with another meaning than its author's.
class Pattern {
 public:
  /// The pattern that stands in tokenizer.json in these words; null if it is not a known one. Those who ask
  /// for the same one share it.
  static std::shared_ptr<const Pattern> named_by(std::string_view expression);
  /// The pattern of the pre-tokenizer ByteLevel.
  static std::shared_ptr<const Pattern> gpt2();

  explicit Pattern(std::string_view expression);
  ~Pattern();

  /// The first match at or behind `from`. `text` is valid UTF-8. With `open`, text may follow: an answer that
  /// what follows could change is NeedsMoreText.
  Search find(std::string_view text, size_t from, bool open, MatchScratch& scratch, Match& match) const;

 private:
  void* code_;
};

}  // namespace halfstep::text
