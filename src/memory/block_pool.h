// Where tensors live: large blocks side by side in one range of addresses, small ones from malloc, all
// counted.
#pragma once

#include <halfstep/memory.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

namespace halfstep {

class AddressRange {
 public:
  /// Reserves this many bytes, or as much of it as the system allows (`ulimit -v`), at least 1 MiB.
  /// Reserved addresses take neither memory nor any share of what the system promises to programs.
  explicit AddressRange(std::size_t wanted_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  std::byte* begin() const { return begin_; }
  std::size_t reserved_bytes() const { return reserved_bytes_; }
  std::size_t usable_bytes() const { return usable_bytes_; }

  /// Makes the next bytes after the usable ones usable too. False when the reservation ends there or the
  /// system refuses.
  bool extend(std::size_t bytes);

  /// The pages of [first, last) lose their content and their memory; they stay usable. False when the system
  /// refuses, as it does for pages locked by mlock.
  static bool give_back(std::byte* first, std::byte* last);

  static constexpr std::size_t kPageBytes = 4096;

 private:
  std::byte* begin_ = nullptr;
  std::size_t reserved_bytes_ = 0;
  std::size_t usable_bytes_ = 0;
};

class PageMap {
 public:
  void grow_to(std::size_t page_count) { words_.resize((page_count + 63) / 64, 0); }

  std::size_t count(std::size_t first, std::size_t last) const {
    std::size_t found = 0;
    for_each_word(first, last, [&](std::size_t word, std::uint64_t mask) {
      found += static_cast<std::size_t>(std::popcount(words_[word] & mask));
    });
    return found;
  }

  void set(std::size_t first, std::size_t last) {
    for_each_word(first, last, [&](std::size_t word, std::uint64_t mask) { words_[word] |= mask; });
  }

  void clear(std::size_t first, std::size_t last) {
    for_each_word(first, last, [&](std::size_t word, std::uint64_t mask) { words_[word] &= ~mask; });
  }

 private:
  /// visit(word, bits of it) over the pages first..last-1.
  template <typename Visit>
  static void for_each_word(std::size_t first, std::size_t last, Visit visit) {
    for (std::size_t page = first; page < last;) {
      const std::size_t bit = page % 64, pages = std::min(last - page, 64 - bit);
      const std::uint64_t ones = pages == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << pages) - 1;
      visit(page / 64, ones << bit);
      page += pages;
    }
  }

  std::vector<std::uint64_t> words_;
};

/// Not thread-safe: its owner holds a lock, so that a breakdown at the peak is one that was.
class Tally {
 public:
  void add(MemoryClass memory_class, std::size_t bytes) {
    of(live_, memory_class) += bytes;
    live_.total += bytes;
    raise_own_peak(memory_class);
    if (live_.total > at_peak_.total) at_peak_ = live_;
  }

  void remove(MemoryClass memory_class, std::size_t bytes) {
    of(live_, memory_class) -= bytes;
    live_.total -= bytes;
  }

  /// The total does not move, so neither does its peak.
  void move(MemoryClass from, MemoryClass to, std::size_t bytes) {
    of(live_, from) -= bytes;
    of(live_, to) += bytes;
    raise_own_peak(to);
  }

  void reset_peak() { class_peaks_ = at_peak_ = live_; }

  const MemoryAmounts& live() const { return live_; }
  const MemoryAmounts& at_peak() const { return at_peak_; }
  MemoryAmounts class_peaks() const {
    MemoryAmounts peaks = class_peaks_;
    peaks.total = at_peak_.total;
    return peaks;
  }

 private:
  static std::size_t& of(MemoryAmounts& amounts, MemoryClass memory_class) {
    return amounts.by_class[static_cast<std::size_t>(memory_class)];
  }
  void raise_own_peak(MemoryClass memory_class) {
    auto& peak = of(class_peaks_, memory_class);
    peak = std::max(peak, of(live_, memory_class));
  }

  MemoryAmounts live_, at_peak_, class_peaks_;
};

struct BlockPoolOptions {
  std::size_t reserved_bytes = std::size_t{1} << 36;
  std::size_t kept_bytes_limit = std::numeric_limits<std::size_t>::max();
  double resident_over_peak = MemoryOptions{}.resident_over_peak;

  /// Asked now and then: bytes that the system can still give. Below `pressure_bytes` everything kept is
  /// given back.
  std::function<std::size_t()> available_bytes = [] { return std::numeric_limits<std::size_t>::max(); };
  std::size_t pressure_bytes = 0;
};

/// Best fit with merging of free neighbours. (docs/decisions/0040 says why, with figures.)
///
/// Safe across threads: one lock, held for the bookkeeping only. A block may be freed by any thread.
class BlockPool {
 public:
  /// Data starts at a multiple of this, as in LibTorch 2.13 (c10/core/alignment.h).
  static constexpr std::size_t kAlignment = 64;
  /// From here on a block lies in the range. Below, malloc does well, and small blocks that live long would
  /// stand between large free ones.
  static constexpr std::size_t kLargeBytes = std::size_t{1} << 16;

  explicit BlockPool(BlockPoolOptions options = {});

  /// Null for 0 bytes, and when the system refuses. Giving back would not help then: what Linux refuses is a
  /// promise of memory, and pages given back stay promised. Lack of pages shows in `available_bytes`.
  void* allocate(std::size_t bytes, MemoryClass memory_class);
  /// Returns the bytes that were asked for.
  std::size_t deallocate(void* data);

  /// Counts a live block under another class.
  void retag(void* data, MemoryClass memory_class);

  void set_limits(std::size_t kept_bytes_limit, double resident_over_peak);
  MemoryReport report() const;
  void reset_peak();
  std::size_t give_back();

  /// Around fork(), so that the child does not inherit a lock that nobody there will open.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  /// Lies just before the data. In the range, headers are chained: the next one begins where a block ends.
  struct alignas(kAlignment) Block {
    std::size_t block_bytes = 0;  // with this header; 0 for a block from malloc
    std::size_t asked_bytes = 0;
    std::size_t resident_bytes = 0;  // of a free block: of its whole pages behind the header
    Block* before = nullptr;         // the neighbour in the range
    MemoryClass memory_class = MemoryClass::Other;
    bool free = false;

    std::byte* begin() { return reinterpret_cast<std::byte*>(this); }
    std::byte* end() { return begin() + block_bytes; }
    void* data() { return begin() + sizeof(Block); }
    static Block* of(void* data) {
      return reinterpret_cast<Block*>(static_cast<std::byte*>(data) - sizeof(Block));
    }
  };
  static_assert(sizeof(Block) == kAlignment);

  struct SmallestFirst {
    using is_transparent = void;
    bool operator()(const Block* a, const Block* b) const {
      return a->block_bytes != b->block_bytes ? a->block_bytes < b->block_bytes : a < b;
    }
    bool operator()(const Block* a, std::size_t bytes) const { return a->block_bytes < bytes; }
    bool operator()(std::size_t bytes, const Block* a) const { return bytes < a->block_bytes; }
  };
  using FreeBlocks = std::set<Block*, SmallestFirst>;

  Block* allocate_small(std::size_t bytes);
  Block* allocate_large(std::size_t bytes);
  Block* take_free_block(std::size_t block_bytes);
  Block* extend(std::size_t block_bytes);
  void split(Block* block, std::size_t block_bytes);
  Block* merge_with_neighbours(Block* block);
  void insert_free(Block* block);
  void remove_free(Block* block);
  Block* after(Block* block) const;

  std::size_t page_of(const std::byte* address) const;
  std::size_t first_whole_page(Block* block) const;
  std::size_t resident_bytes(std::size_t first_page, std::size_t last_page) const;
  void look_for_pressure(std::size_t bytes, std::size_t new_bytes);
  void keep_within_limits();
  std::size_t give_back_bytes(std::size_t wanted_bytes);
  std::size_t give_back_from(Block* block, std::size_t wanted_bytes);

  mutable std::mutex mutex_;
  BlockPoolOptions options_;
  AddressRange range_;
  PageMap resident_pages_;
  Block* last_ = nullptr;             // the highest block of the range
  FreeBlocks kept_, returned_;        // at least half resident, or less
  std::size_t kept_bytes_ = 0;        // resident in both
  std::size_t large_bytes_ = 0;       // in live blocks of the range
  std::size_t large_bytes_peak_ = 0;  // since the last give_back()
  std::size_t bytes_since_look_ = 0;  // touched anew, and a share of those freed
  std::size_t given_back_bytes_ = 0;
  std::size_t allocations_ = 0, deallocations_ = 0;
  Tally tally_;
};

}  // namespace halfstep
