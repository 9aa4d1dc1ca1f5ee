// From text to ids.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/definition.h"

namespace halfstep::text {

/// The ids of words that were met before. Words of a text repeat: 96 of 100 in Python's documentation and
/// library are answered from here. One slot a hash, one cache line a slot; a word that meets another in its
/// slot takes its place, so the size is fixed and nothing is ever cleared.
class WordCache {
 public:
  static constexpr size_t kMaxBytes = 30;
  static constexpr size_t kMaxIds = 8;

  WordCache() : slots_(kSlots) {}

  /// The word's ids; empty if it is not here. No word of ours has none.
  std::span<const int32_t> find(std::string_view word) const {
    if (word.size() > kMaxBytes) return {};
    const Slot& slot = slots_[slot_of(word)];
    if (slot.bytes != word.size() || std::memcmp(slot.word.data(), word.data(), word.size()) != 0) return {};
    return {slot.ids.data(), slot.id_count};
  }

  void put(std::string_view word, std::span<const int32_t> ids) {
    if (word.size() > kMaxBytes || ids.size() > kMaxIds) return;
    Slot& slot = slots_[slot_of(word)];
    slot.bytes = static_cast<uint8_t>(word.size());
    slot.id_count = static_cast<uint8_t>(ids.size());
    std::memcpy(slot.word.data(), word.data(), word.size());
    std::memcpy(slot.ids.data(), ids.data(), ids.size_bytes());
  }

 private:
  static constexpr size_t kSlots = size_t{1} << 15;

  struct alignas(64) Slot {
    uint8_t bytes = 0;
    uint8_t id_count = 0;
    std::array<char, kMaxBytes> word;
    std::array<int32_t, kMaxIds> ids;
  };
  static_assert(sizeof(Slot) == 64);

  static size_t slot_of(std::string_view word) {
    uint64_t hash = word.size();
    while (word.size() >= 8) {
      uint64_t eight;
      std::memcpy(&eight, word.data(), 8);
      hash = mix(hash ^ eight);
      word.remove_prefix(8);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, word.data(), word.size());
    return mix(hash ^ rest) >> 49;
  }
  static_assert(kSlots == size_t{1} << (64 - 49));

  static uint64_t mix(uint64_t x) { return (x ^ x >> 29) * 0x9E3779B97F4A7C15u; }

  std::vector<Slot> slots_;
};

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
  /// `text_offset`: of the text that `encode` is given, in the whole, for messages.
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
  /// Continuing with the rest and what follows gives the ids of the whole: every match is decided by what
  /// stands at and behind its beginning, never by what stands before, and PCRE2 reports (by a partial match)
  /// when it would have looked behind the end.
  ///
  /// Of a tokenizer with NFC, text counts as encoded when its form NFC is certain. What of that is no whole
  /// word yet is left in `normalized`, and the next call begins with it: a word may end between a letter and
  /// a mark that NFC has moved, where no byte of the text ends.
  size_t encode(std::string_view text, bool open, std::string& normalized);

  size_t dropped_bytes() const { return dropped_bytes_; }
  /// The offset of what the next call is given; with NFC, in the normalized text.
  uint64_t next_offset() const { return static_cast<uint64_t>(source_offset_); }

 private:
  size_t encode_nfc(std::string_view text, bool open, std::string& normalized);
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
