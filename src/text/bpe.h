// Byte-pair encoding: the ids of one word.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::text {

inline constexpr int32_t kNoToken = -1;

/// Longer words are refused: merging takes up to 60 bytes of memory for each of theirs. No text that was
/// written has them, but a file of zeros is one word.
inline constexpr size_t kMaxWordBytes = size_t{64} << 20;

/// Two neighbouring tokens become `merged`. The merge whose rank is lowest goes first, the leftmost of
/// equals.
struct Merge {
  int32_t left;
  int32_t right;
  int32_t merged;
};

/// From a pair of tokens to its merge; open addressing, as it is asked once or more for every byte of a text.
class MergeTable {
 public:
  struct Entry {
    uint64_t pair = kEmpty;
    uint32_t rank = 0;
    int32_t merged = kNoToken;
  };

  /// In order of rank. No pair stands twice.
  explicit MergeTable(std::span<const Merge> merges);

  /// Null if the pair is never merged.
  const Entry* find(int32_t left, int32_t right) const {
    const uint64_t pair = key(left, right);
    for (size_t slot = slot_of(pair);; slot = (slot + 1) & mask_) {
      if (entries_[slot].pair == pair) return &entries_[slot];
      if (entries_[slot].pair == kEmpty) return nullptr;
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // ids are not negative, so no pair is this
  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  // Both halves of the product count, so every bit of both ids does; and the factors are drawn anew in every
  // process, so that no file can be made whose pairs all meet in one slot.
  size_t slot_of(uint64_t pair) const {
    __extension__ using Product = unsigned __int128;
    const Product product = Product{pair ^ seed_.addend} * seed_.factor;
    return (static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product)) & mask_;
  }

  struct Seed {
    uint64_t addend;
    uint64_t factor;
  };
  static Seed random_seed();

  Seed seed_ = random_seed();
  size_t mask_;
  std::vector<Entry> entries_;
};

/// A node of a word that is being merged: a token and its neighbours.
struct Symbol {
  int32_t id;
  int32_t previous;
  int32_t next;
};

struct PendingMerge {
  uint32_t rank;
  int32_t at;
  int32_t left;
  int32_t right;
};

struct BpeScratch {
  std::vector<Symbol> symbols;
  std::vector<PendingMerge> pending;
};

struct BpeModel {
  std::array<int32_t, 256> id_of_byte;  ///< kNoToken where the vocabulary lacks the byte
  MergeTable merges;
};

/// Appends the ids of one word. Bytes that the vocabulary lacks are left out, as `tokenizers` does; how many
/// is returned. O(n log n) in the length of the word, which is at most kMaxWordBytes.
size_t append_word(const BpeModel& model, std::string_view word, BpeScratch& scratch,
                   std::vector<int32_t>& ids);

}  // namespace halfstep::text
