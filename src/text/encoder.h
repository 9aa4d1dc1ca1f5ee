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

/// One call of `encode`.
class Encoder {
 public:
  Encoder(const Definition& definition, bool drop_missing_bytes, EncoderScratch& scratch,
          std::vector<int32_t>& ids)
      : definition_(definition), drop_missing_bytes_(drop_missing_bytes), scratch_(scratch), ids_(ids) {}

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
  void append(std::string_view word);

  const Definition& definition_;
  bool drop_missing_bytes_;
  EncoderScratch& scratch_;
  std::vector<int32_t>& ids_;
  size_t dropped_bytes_ = 0;
};

}  // namespace halfstep::text
