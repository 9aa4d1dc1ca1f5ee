#include "memory/block_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

namespace halfstep {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kReserved = 4096 * kMiB;
// A header, and what is cut off at both ends to whole pages.
constexpr std::size_t kEdges = 3 * kPage;

std::uintptr_t number(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

/// Allocates and writes every page, as a kernel would.
char* touched(BlockPool& pool, std::size_t bytes, MemoryClass memory_class = MemoryClass::Other) {
  void* data = pool.allocate(bytes, memory_class);
  std::memset(data, 1, bytes);
  return static_cast<char*>(data);
}

/// The kernel's word on how many of these bytes are resident.
std::size_t resident_bytes(const void* data, std::size_t bytes) {
  const std::uintptr_t first = number(data) / kPage * kPage;
  const std::size_t pages = (number(data) + bytes - first + kPage - 1) / kPage;
  std::vector<unsigned char> in_core(pages);
  EXPECT_EQ(mincore(reinterpret_cast<void*>(first), pages * kPage, in_core.data()), 0);
  std::size_t resident = 0;
  for (const unsigned char page : in_core) resident += page & 1;
  return resident * kPage;
}

TEST(BlockPool, GivesNullForNoBytesAndTakesItBack) {
  BlockPool pool;
  EXPECT_EQ(pool.allocate(0, MemoryClass::Other), nullptr);
  EXPECT_EQ(pool.deallocate(nullptr), 0u);
  EXPECT_EQ(pool.report().allocations, 0u);
}

TEST(BlockPool, AlignsDataTo64BytesAtEverySize) {
  BlockPool pool({.reserved_bytes = kReserved});
  std::vector<void*> all;
  for (const std::size_t around : {std::size_t{66}, kPage, BlockPool::kLargeBytes, kMiB})
    for (std::size_t bytes = around - 65; bytes <= around + 65; ++bytes) {
      all.push_back(pool.allocate(bytes, MemoryClass::Other));
      EXPECT_EQ(number(all.back()) % 64, 0u) << bytes;
    }
  for (void* data : all) pool.deallocate(data);
}

// Oracle: plain sums over a list of what is live.
TEST(BlockPool, CountsALongRandomHistoryExactly) {
  struct Live {
    void* data;
    std::size_t bytes;
    MemoryClass memory_class;
  };
  std::mt19937_64 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const auto any_class = [&] { return static_cast<MemoryClass>(below(kMemoryClassCount)); };
  BlockPool pool({.reserved_bytes = kReserved, .kept_bytes_limit = 64 * kMiB});
  std::vector<Live> live;
  MemoryAmounts at_peak, class_peaks;
  std::size_t allocations = 0;
  for (int i = 0; i < 40'000; ++i) {
    const std::size_t action = below(live.size() > 200 ? 9 : 5);
    if (action < 3) {
      const std::size_t bytes = 1 + below(std::size_t{1} << (4 + below(18)));
      const MemoryClass memory_class = any_class();
      live.push_back({pool.allocate(bytes, memory_class), bytes, memory_class});
      ++allocations;
    } else if (action == 3 && !live.empty()) {
      Live& chosen = live[below(live.size())];
      chosen.memory_class = any_class();
      pool.retag(chosen.data, chosen.memory_class);
    } else if (!live.empty()) {
      std::swap(live[below(live.size())], live.back());
      EXPECT_EQ(pool.deallocate(live.back().data), live.back().bytes);
      live.pop_back();
    }
    if (i == 20'000) {
      pool.reset_peak();
      at_peak = class_peaks = {};
    }
    MemoryAmounts now;
    for (const Live& block : live) {
      now.by_class[static_cast<std::size_t>(block.memory_class)] += block.bytes;
      now.total += block.bytes;
    }
    if (now.total > at_peak.total) at_peak = now;
    class_peaks.total = at_peak.total;
    for (std::size_t c = 0; c < kMemoryClassCount; ++c)
      class_peaks.by_class[c] = std::max(class_peaks.by_class[c], now.by_class[c]);

    const MemoryReport report = pool.report();
    ASSERT_EQ(report.live, now) << i;
    ASSERT_EQ(report.at_peak, at_peak) << i;
    ASSERT_EQ(report.class_peaks, class_peaks) << i;
    ASSERT_EQ(report.live_blocks, live.size());
    ASSERT_EQ(report.allocations, allocations);
    ASSERT_LE(report.kept_bytes, 64 * kMiB);
  }
  for (const Live& block : live) pool.deallocate(block.data);
  EXPECT_EQ(pool.report().live, MemoryAmounts{});
  const std::size_t kept = pool.report().kept_bytes;
  EXPECT_EQ(pool.give_back(), kept);
  EXPECT_EQ(pool.report().kept_bytes, 0u);
}

TEST(BlockPool, UsesAFreedBlockAgainForTheSameSize) {
  BlockPool pool({.reserved_bytes = kReserved});
  char* first = touched(pool, 8 * kMiB);
  void* wall = pool.allocate(kMiB, MemoryClass::Other);
  pool.deallocate(first);
  EXPECT_EQ(resident_bytes(first + kPage, 8 * kMiB - kPage), 8 * kMiB);
  EXPECT_NEAR(pool.report().kept_bytes, 8 * kMiB, kEdges);
  EXPECT_EQ(pool.allocate(8 * kMiB, MemoryClass::Other), first);
  EXPECT_EQ(pool.report().kept_bytes, 0u);
  pool.deallocate(wall);
}

TEST(BlockPool, TakesTheSmallestFreeBlockThatFits) {
  BlockPool pool({.reserved_bytes = kReserved});
  char* large = touched(pool, 8 * kMiB);
  pool.allocate(kMiB, MemoryClass::Other);
  char* small = touched(pool, 4 * kMiB);
  pool.allocate(kMiB, MemoryClass::Other);
  pool.deallocate(large);
  pool.deallocate(small);
  EXPECT_EQ(pool.allocate(3 * kMiB, MemoryClass::Other), small);
}

// In each order of freeing: the middle last, first, with one neighbour free.
TEST(BlockPool, MergesFreeNeighbours) {
  for (const auto& order :
       {std::array{0, 2, 1}, std::array{1, 0, 2}, std::array{0, 1, 2}, std::array{2, 1, 0}}) {
    BlockPool pool({.reserved_bytes = kReserved});
    std::array<char*, 3> parts;
    for (char*& part : parts) part = touched(pool, 4 * kMiB);
    pool.allocate(kMiB, MemoryClass::Other);
    for (const int i : order) pool.deallocate(parts[static_cast<std::size_t>(i)]);
    EXPECT_EQ(pool.allocate(12 * kMiB, MemoryClass::Other), parts[0]);
  }
}

TEST(BlockPool, GivesBackBeyondItsBoundAndNoMore) {
  constexpr std::size_t kLimit = 16 * kMiB;
  BlockPool pool({.reserved_bytes = kReserved, .kept_bytes_limit = kLimit});
  char* data = touched(pool, 40 * kMiB);
  pool.deallocate(data);
  // A chunk of 64 pages at most beyond what was over the bound.
  EXPECT_LE(pool.report().kept_bytes, kLimit);
  EXPECT_GE(pool.report().kept_bytes, kLimit - 64 * kPage);
  EXPECT_NEAR(resident_bytes(data, 40 * kMiB), pool.report().kept_bytes, kEdges);
  EXPECT_NEAR(pool.report().given_back_bytes, 40 * kMiB - pool.report().kept_bytes, kEdges);
}

TEST(BlockPool, GivesEverythingBackOnRequestAndWorksOn) {
  BlockPool pool({.reserved_bytes = kReserved});
  std::vector<char*> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(touched(pool, 2 * kMiB));
  for (std::size_t i = 0; i < blocks.size(); i += 2) pool.deallocate(blocks[i]);
  EXPECT_NEAR(pool.give_back(), 20 * kMiB, 10 * kEdges);
  EXPECT_EQ(pool.report().kept_bytes, 0u);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::size_t resident = resident_bytes(blocks[i], 2 * kMiB);
    EXPECT_NEAR(resident, i % 2 ? 2 * kMiB : 0, kEdges) << i;
  }
  EXPECT_EQ(blocks[1][kMiB], 1) << "a live block must keep its content";
  char* again = touched(pool, 2 * kMiB);
  EXPECT_NE(std::find(blocks.begin(), blocks.end(), again), blocks.end()) << "addresses are used again";
  EXPECT_EQ(pool.give_back(), 0u);
}

// Blocks of 3 MiB, half of them freed, leave holes too small for blocks of 4 MiB.
TEST(BlockPool, HolesCostNoMoreThanTheShareOfThePeakThatWasAllowed) {
  constexpr double kOverPeak = 1.1;
  constexpr std::size_t kSlack = 32 * kMiB;  // MemoryOptions::resident_over_peak
  BlockPool pool({.reserved_bytes = kReserved, .resident_over_peak = kOverPeak});
  std::vector<char*> blocks, others;
  for (int i = 0; i < 200; ++i) blocks.push_back(touched(pool, 3 * kMiB));
  for (std::size_t i = 0; i < blocks.size(); i += 2) pool.deallocate(blocks[i]);
  for (int i = 0; i < 70; ++i) others.push_back(touched(pool, 4 * kMiB));
  const double peak = 600 * kMiB;
  const char* first = *std::min_element(blocks.begin(), blocks.end());
  const char* last = *std::max_element(others.begin(), others.end());
  const auto extent = static_cast<std::size_t>(last - first) + 4 * kMiB;
  EXPECT_GT(extent, kOverPeak * peak + kSlack) << "else this test shows nothing";
  EXPECT_LE(resident_bytes(first, extent), kOverPeak * peak + kSlack + 300 * kEdges);
}

TEST(BlockPool, GivesBackUnderPressureBeforeItGrows) {
  std::size_t available = std::size_t{1} << 40;
  BlockPool pool({.reserved_bytes = kReserved,
                  .resident_over_peak = 10,
                  .available_bytes = [&] { return available; },
                  .pressure_bytes = 100 * kMiB});
  char* hole = touched(pool, 64 * kMiB);
  pool.allocate(kMiB, MemoryClass::Other);
  pool.deallocate(hole);
  void* unpressed = pool.allocate(100 * kMiB, MemoryClass::Other);
  EXPECT_NEAR(pool.report().kept_bytes, 64 * kMiB, kEdges);
  available = 150 * kMiB;
  void* pressed = pool.allocate(100 * kMiB, MemoryClass::Other);
  EXPECT_EQ(pool.report().kept_bytes, 0u);
  EXPECT_NEAR(resident_bytes(hole, 64 * kMiB), 0, kEdges);
  pool.deallocate(unpressed);
  pool.deallocate(pressed);
}

// Somebody else takes the memory, while this pool only repeats its steps.
TEST(BlockPool, GivesBackUnderPressureAlsoWhenItDoesNotGrow) {
  std::size_t available = std::size_t{1} << 40;
  BlockPool pool({.reserved_bytes = kReserved,
                  .available_bytes = [&] { return available; },
                  .pressure_bytes = 100 * kMiB});
  const auto step = [&] { pool.deallocate(pool.allocate(64 * kMiB, MemoryClass::Other)); };
  for (int i = 0; i < 100; ++i) step();
  EXPECT_EQ(pool.report().given_back_bytes, 0u);
  available = 50 * kMiB;
  for (int i = 0; i < 100; ++i) step();
  EXPECT_GT(pool.report().given_back_bytes, 0u);
}

TEST(BlockPool, KeepsWhatTheSystemRefusesToTake) {
  BlockPool pool({.reserved_bytes = kReserved});
  char* data = touched(pool, 2 * kMiB);
  // The call itself: the sanitizers make mlock() do nothing.
  if (syscall(SYS_mlock, data + kMiB, kPage) != 0) GTEST_SKIP() << "no page may be locked here";
  pool.deallocate(data);
  EXPECT_EQ(pool.give_back(), 0u);
  EXPECT_NEAR(pool.report().kept_bytes, 2 * kMiB, kEdges);
  syscall(SYS_munlock, data + kMiB, kPage);
  EXPECT_NEAR(pool.give_back(), 2 * kMiB, kEdges);
}

TEST(BlockPool, RefusesWhatCannotBeAndStaysWhole) {
  BlockPool pool({.reserved_bytes = 64 * kMiB});
  EXPECT_EQ(pool.allocate(std::numeric_limits<std::size_t>::max(), MemoryClass::Other), nullptr);
  EXPECT_EQ(pool.allocate(65 * kMiB, MemoryClass::Other), nullptr);
  EXPECT_EQ(pool.report().live.total, 0u);
  void* all = pool.allocate(63 * kMiB, MemoryClass::Other);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(pool.allocate(2 * kMiB, MemoryClass::Other), nullptr);
  pool.deallocate(all);
  EXPECT_NE(pool.allocate(2 * kMiB, MemoryClass::Other), nullptr);
}

TEST(BlockPool, WorksOnInAForkedChild) {
  BlockPool pool({.reserved_bytes = kReserved});
  char* data = touched(pool, 2 * kMiB);
  pool.lock_for_fork();
  const pid_t child = fork();
  pool.unlock_after_fork();
  if (child == 0) {
    bool good = data[kMiB] == 1;
    pool.deallocate(data);
    good = good && touched(pool, kMiB) != nullptr && pool.report().live.total == kMiB;
    _exit(good ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(pool.report().live.total, 2 * kMiB);
}

}  // namespace
}  // namespace halfstep
