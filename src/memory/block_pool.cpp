#include "memory/block_pool.h"

#include <halfstep/error.h>

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace halfstep {
namespace {

/// Where addresses are limited, half of them are left to everybody else.
std::size_t at_most_half_of_the_limit(std::size_t wanted_bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted_bytes;
  return std::min(wanted_bytes, static_cast<std::size_t>(limit.rlim_cur) / 2);
}

}  // namespace

AddressRange::AddressRange(std::size_t wanted_bytes) {
  constexpr std::size_t kFewest = std::size_t{1} << 20;
  std::size_t bytes = std::max(kFewest, at_most_half_of_the_limit(wanted_bytes) / kPageBytes * kPageBytes);
  for (; bytes >= kFewest; bytes = bytes / 2 / kPageBytes * kPageBytes) {
    void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    begin_ = static_cast<std::byte*>(range);
    reserved_bytes_ = bytes;
    return;
  }
  HALFSTEP_CHECK(false, "CPU allocator: the system reserves not even ", kFewest, " bytes of addresses (",
                 std::strerror(errno), "). Raise `ulimit -v`, or do not install the allocator.");
}

AddressRange::~AddressRange() { munmap(begin_, reserved_bytes_); }

bool AddressRange::extend(std::size_t bytes) {
  if (bytes > reserved_bytes_ - usable_bytes_) return false;
  if (mprotect(begin_ + usable_bytes_, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  // Where the system has huge pages for those who ask: products read far more pages than the processor
  // remembers. Where it has none nothing is lost.
  madvise(begin_ + usable_bytes_, bytes, MADV_HUGEPAGE);
  usable_bytes_ += bytes;
  return true;
}

bool AddressRange::give_back(std::byte* first, std::byte* last) {
  return madvise(first, static_cast<std::size_t>(last - first), MADV_DONTNEED) == 0;
}

namespace {

constexpr std::size_t kPage = AddressRange::kPageBytes;
// The range becomes usable in strides: a system call each, and no memory until touched.
constexpr std::size_t kStride = std::size_t{64} << 20;
// For small pools, where a share of the peak is less than a hole or two.
constexpr std::size_t kResidentSlack = std::size_t{32} << 20;
// The system is asked for its free memory when so much was touched anew, or 64 times as much freed: some 100
// us against some 30 ms of page faults, or more of computing.
constexpr std::size_t kBytesBetweenLooks = std::size_t{64} << 20;
constexpr std::size_t kFreedBytesForOneTouched = 64;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

BlockPool::BlockPool(BlockPoolOptions options)
    : options_(std::move(options)), range_(options_.reserved_bytes) {}

void* BlockPool::allocate(std::size_t bytes, MemoryClass memory_class) {
  if (bytes == 0) return nullptr;
  const bool large = bytes >= kLargeBytes;
  Block* block = large ? nullptr : allocate_small(bytes);

  const std::lock_guard lock(mutex_);
  if (large) block = allocate_large(bytes);
  if (!block) return nullptr;
  block->asked_bytes = bytes;
  block->memory_class = memory_class;
  ++allocations_;
  tally_.add(memory_class, bytes);
  return block->data();
}

std::size_t BlockPool::deallocate(void* data) {
  if (!data) return 0;
  Block* block = Block::of(data);
  const std::size_t asked_bytes = block->asked_bytes;
  {
    const std::lock_guard lock(mutex_);
    ++deallocations_;
    tally_.remove(block->memory_class, asked_bytes);
    if (block->block_bytes != 0) {
      large_bytes_ -= block->block_bytes;
      const std::size_t block_bytes = block->block_bytes;
      block->resident_bytes = resident_bytes(first_whole_page(block), page_of(block->end()));
      insert_free(merge_with_neighbours(block));
      look_for_pressure(block_bytes / kFreedBytesForOneTouched, 0);
      keep_within_limits();
      return asked_bytes;
    }
  }
  std::free(block);
  return asked_bytes;
}

void BlockPool::retag(void* data, MemoryClass memory_class) {
  if (!data) return;
  Block* block = Block::of(data);
  const std::lock_guard lock(mutex_);
  tally_.move(block->memory_class, memory_class, block->asked_bytes);
  block->memory_class = memory_class;
}

void BlockPool::set_limits(std::size_t kept_bytes_limit, double resident_over_peak) {
  const std::lock_guard lock(mutex_);
  options_.kept_bytes_limit = kept_bytes_limit;
  options_.resident_over_peak = resident_over_peak;
  keep_within_limits();
}

MemoryReport BlockPool::report() const {
  const std::lock_guard lock(mutex_);
  return {.live = tally_.live(),
          .at_peak = tally_.at_peak(),
          .class_peaks = tally_.class_peaks(),
          .live_blocks = allocations_ - deallocations_,
          .allocations = allocations_,
          .kept_bytes = kept_bytes_,
          .given_back_bytes = given_back_bytes_};
}

void BlockPool::reset_peak() {
  const std::lock_guard lock(mutex_);
  tally_.reset_peak();
}

std::size_t BlockPool::give_back() {
  const std::lock_guard lock(mutex_);
  large_bytes_peak_ = large_bytes_;
  return give_back_bytes(kept_bytes_);
}

BlockPool::Block* BlockPool::allocate_small(std::size_t bytes) {
  void* memory = std::aligned_alloc(kAlignment, round_up(bytes + sizeof(Block), kAlignment));
  return memory ? new (memory) Block : nullptr;
}

BlockPool::Block* BlockPool::allocate_large(std::size_t bytes) {
  if (bytes > range_.reserved_bytes()) return nullptr;  // also keeps the sums below from overflowing
  const std::size_t block_bytes = round_up(bytes + sizeof(Block), kAlignment);
  Block* block = take_free_block(block_bytes);
  if (!block) block = extend(block_bytes);
  if (!block) return nullptr;
  split(block, block_bytes);

  const std::size_t first = page_of(block->begin()), last = page_of(block->end() - 1) + 1;
  const std::size_t new_bytes = (last - first) * kPage - resident_bytes(first, last);
  large_bytes_ += block->block_bytes;
  large_bytes_peak_ = std::max(large_bytes_peak_, large_bytes_);
  if (new_bytes > 0) {
    look_for_pressure(new_bytes, new_bytes);
    keep_within_limits();
    resident_pages_.set(first, last);
  }
  return block;
}

BlockPool::Block* BlockPool::take_free_block(std::size_t block_bytes) {
  for (FreeBlocks* blocks : {&kept_, &returned_}) {
    const auto fit = blocks->lower_bound(block_bytes);
    if (fit == blocks->end()) continue;
    Block* block = *fit;
    remove_free(block);
    return block;
  }
  return nullptr;
}

/// A free block at the end of the range, in no list, of at least this size.
BlockPool::Block* BlockPool::extend(std::size_t block_bytes) {
  const std::size_t at_the_end = last_ && last_->free ? last_->block_bytes : 0;
  const std::size_t missing = block_bytes - at_the_end;
  const std::size_t left = range_.reserved_bytes() - range_.usable_bytes();
  const std::size_t grown = std::min(round_up(missing, kStride), left);
  std::byte* const end = range_.begin() + range_.usable_bytes();
  if (grown < missing || !range_.extend(grown)) return nullptr;
  resident_pages_.grow_to(range_.usable_bytes() / kPage);

  Block* block = new (end) Block{.block_bytes = grown, .before = last_};
  last_ = block;
  return merge_with_neighbours(block);
}

/// Cuts what is beyond `block_bytes` off into a free block, unless no large block would ever fit there.
void BlockPool::split(Block* block, std::size_t block_bytes) {
  block->free = false;
  if (block->block_bytes - block_bytes < kLargeBytes) return;
  Block* rest = new (block->begin() + block_bytes)
      Block{.block_bytes = block->block_bytes - block_bytes, .before = block};
  // Only what was cut off is counted again: the rest may be most of the range.
  rest->resident_bytes =
      block->resident_bytes - resident_bytes(first_whole_page(block), first_whole_page(rest));
  resident_pages_.set(page_of(rest->begin()), page_of(rest->begin()) + 1);
  block->block_bytes = block_bytes;
  if (last_ == block) last_ = rest;
  if (Block* next = after(rest)) next->before = rest;
  insert_free(rest);
}

BlockPool::Block* BlockPool::merge_with_neighbours(Block* block) {
  const auto absorb = [this](Block* block, Block* next) {
    const std::size_t between = resident_bytes(page_of(next->begin()), first_whole_page(next));
    block->resident_bytes += between + next->resident_bytes;
    block->block_bytes += next->block_bytes;
    if (last_ == next) last_ = block;
    if (Block* beyond = after(block)) beyond->before = block;
  };
  if (Block* next = after(block); next && next->free) {
    remove_free(next);
    absorb(block, next);
  }
  if (Block* before = block->before; before && before->free) {
    remove_free(before);
    absorb(before, block);
    block = before;
  }
  return block;
}

void BlockPool::insert_free(Block* block) {
  block->free = true;
  kept_bytes_ += block->resident_bytes;
  (2 * block->resident_bytes >= block->block_bytes ? kept_ : returned_).insert(block);
}

void BlockPool::remove_free(Block* block) {
  kept_bytes_ -= block->resident_bytes;
  if (kept_.erase(block) == 0) returned_.erase(block);
}

BlockPool::Block* BlockPool::after(Block* block) const {
  return block == last_ ? nullptr : reinterpret_cast<Block*>(block->end());
}

std::size_t BlockPool::page_of(const std::byte* address) const {
  return static_cast<std::size_t>(address - range_.begin()) / kPage;
}

std::size_t BlockPool::resident_bytes(std::size_t first_page, std::size_t last_page) const {
  return resident_pages_.count(first_page, last_page) * kPage;
}

/// The first page of a block that holds nothing but its data.
std::size_t BlockPool::first_whole_page(Block* block) const {
  return page_of(static_cast<std::byte*>(block->data()) + kPage - 1);
}

/// `bytes` bring the next look nearer; `new_bytes` are about to be touched for the first time.
void BlockPool::look_for_pressure(std::size_t bytes, std::size_t new_bytes) {
  bytes_since_look_ += bytes;
  if (bytes_since_look_ < kBytesBetweenLooks) return;
  bytes_since_look_ = 0;
  if (kept_bytes_ > 0 && options_.available_bytes() < options_.pressure_bytes + new_bytes)
    give_back_bytes(kept_bytes_);
}

void BlockPool::keep_within_limits() {
  const double share = options_.resident_over_peak * static_cast<double>(large_bytes_peak_);
  const std::size_t resident_limit = static_cast<std::size_t>(share) + kResidentSlack;
  const std::size_t allowed = std::min(options_.kept_bytes_limit, resident_limit - large_bytes_);
  if (kept_bytes_ > allowed) give_back_bytes(kept_bytes_ - allowed);
}

/// From the largest blocks first: the fewest calls, and the fewest holes.
std::size_t BlockPool::give_back_bytes(std::size_t wanted_bytes) {
  std::size_t given = 0;
  while (given < wanted_bytes && !kept_.empty()) {  // each leaves kept_, or was enough
    const std::size_t from_this = give_back_from(*kept_.rbegin(), wanted_bytes - given);
    if (from_this == 0) break;  // refused: nor would the others be taken
    given += from_this;
  }
  for (auto block = returned_.rbegin(); given < wanted_bytes && block != returned_.rend(); ++block)
    given += give_back_from(*block, wanted_bytes - given);
  given_back_bytes_ += given;
  return given;
}

/// From the end of the block, because the start is what the next allocation takes. Up to 63 pages more than
/// wanted, so that a pool at its bound does not call the system for every page.
std::size_t BlockPool::give_back_from(Block* block, std::size_t wanted_bytes) {
  const std::size_t wanted = round_up(std::min(wanted_bytes, block->resident_bytes), kPage) / kPage;
  const std::size_t first = first_whole_page(block), last = page_of(block->end());
  std::size_t start = last, found = 0;
  while (found < wanted) {
    const std::size_t chunk = std::min<std::size_t>(64, start - first);
    start -= chunk;
    found += resident_pages_.count(start, start + chunk);
  }
  if (found == 0 || !AddressRange::give_back(range_.begin() + start * kPage, range_.begin() + last * kPage))
    return 0;
  remove_free(block);
  resident_pages_.clear(start, last);
  block->resident_bytes -= found * kPage;
  insert_free(block);
  return found * kPage;
}

}  // namespace halfstep
