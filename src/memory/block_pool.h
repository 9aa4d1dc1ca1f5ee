// Where tensors live: large blocks side by side in one range of addresses, small ones from malloc, all
// counted.
#pragma once

#include <functional>
#include <limits>
#include <mutex>
#include <set>

#include "memory/address_range.h"
#include "memory/page_map.h"
#include "memory/tally.h"

namespace halfstep {

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
