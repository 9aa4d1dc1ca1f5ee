// From text to ids.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/definition.h"
#include "text/word_cache.h"

namespace halfstep::text {

/// What a thread keeps from call to call.
struct EncoderScratch {
  WordCache cache;
  MatchScratch match;
  BpeScratch bpe;
};

/// An Error: the word that begins at `offset` of the text is longer than kMaxWordBytes.
[[noreturn]] void refuse_word_at(int64_t offset);

/// One call of `encode`.
class Encoder {
 public:
  /// `text_offset`: of the text that will be given, in the whole, for messages.
  Encoder(const Definition& definition, bool drop_missing_bytes, EncoderScratch& scratch,
          std::vector<int32_t>& ids, uint64_t text_offset)
      : definition_(definition),
        drop_missing_bytes_(drop_missing_bytes),
        scratch_(scratch),
        ids_(ids),
        source_offset_(static_cast<int64_t>(text_offset)) {}

  /// Appends the ids of as much of `text` as is certain, and returns how many bytes that was. All of it,
  /// unless it is `open`: text may follow.
  ///
  /// Going on with the rest and what follows gives the ids of the whole: every match is decided by what
  /// stands at and behind its beginning, never by what stands before, and PCRE2 tells (by a partial match)
  /// when it would have looked behind the end.
  size_t encode(std::string_view text, bool open);

  size_t dropped_bytes() const { return dropped_bytes_; }

 private:
  size_t cut_at_added(const AddedTokens& tokens, std::string_view text, bool open);
  size_t cut_at_invalid(std::string_view text, bool open);
  size_t run_stage(size_t stage, std::string_view text, bool open);
  size_t cut_at_digits(size_t stage, std::string_view text, bool open);
  size_t cut_by_pattern(size_t stage, std::string_view text, bool open);
  size_t cut_with_space(size_t stage, std::string_view text);
  void append(std::string_view word);
  int64_t offset_of(std::string_view piece) const;

  const Definition& definition_;
  bool drop_missing_bytes_;
  EncoderScratch& scratch_;
  std::vector<int32_t>& ids_;
  std::string_view source_;  // what words are cut from: the text, or a copy with a space before it
  int64_t source_offset_;
  int64_t source_spaces_ = 0;  // put before it
  size_t dropped_bytes_ = 0;
};

}  // namespace halfstep::text
