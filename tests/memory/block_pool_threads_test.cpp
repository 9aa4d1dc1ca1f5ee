// Eight threads allocate and free across each other. Run under the thread sanitizer too.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "memory/block_pool.h"

namespace halfstep {
namespace {

constexpr int kThreads = 8;

struct Parcel {
  std::uint64_t* words = nullptr;
  std::size_t count = 0;
  std::uint64_t stamp = 0;
};

/// Where threads leave blocks for one another.
class Exchange {
 public:
  /// Leaves one, takes the one that lay there.
  Parcel swap(std::size_t place, Parcel parcel) {
    const std::lock_guard lock(mutex_);
    std::swap(places_[place % places_.size()], parcel);
    return parcel;
  }

 private:
  std::mutex mutex_;
  std::array<Parcel, 64> places_;
};

/// Every 128th word, so that each page is written, and the last.
template <typename Visit>
void for_marked_words(const Parcel& parcel, Visit visit) {
  for (std::size_t i = 0; i < parcel.count; i += 128) visit(parcel.words[i], parcel.stamp + i);
  const std::size_t last = parcel.count - 1;
  if (last % 128 != 0) visit(parcel.words[last], parcel.stamp + last);
}

/// False when somebody else wrote into it.
bool open_and_free(BlockPool& pool, const Parcel& parcel) {
  bool intact = true;
  for_marked_words(parcel, [&](std::uint64_t& word, std::uint64_t expected) { intact &= word == expected; });
  return pool.deallocate(parcel.words) == parcel.count * 8 && intact;
}

TEST(BlockPoolThreads, BlocksFreedByOtherThreadsKeepTheirContentUntilThen) {
  constexpr int kRounds = 3000;
  BlockPool pool({.reserved_bytes = std::size_t{8} << 30, .kept_bytes_limit = std::size_t{16} << 20});
  Exchange exchange;
  std::atomic<int> damaged = 0;
  const auto work = [&](int thread) {
    std::mt19937_64 random(static_cast<std::uint64_t>(thread));
    for (int round = 0; round < kRounds; ++round) {
      Parcel parcel;
      parcel.count = 2 + random() % (std::size_t{1} << (1 + random() % 17));  // to 1 MiB
      parcel.stamp = random();
      const auto memory_class = static_cast<MemoryClass>(random() % kMemoryClassCount);
      parcel.words = static_cast<std::uint64_t*>(pool.allocate(parcel.count * 8, memory_class));
      for_marked_words(parcel, [](std::uint64_t& word, std::uint64_t stamp) { word = stamp; });
      if (round % 3 == 0) pool.retag(parcel.words, MemoryClass::Gradient);
      if (round % 500 == 0) pool.give_back();
      if (round % 100 == 0) pool.reset_peak();
      const Parcel taken = exchange.swap(random(), parcel);
      if (taken.words && !open_and_free(pool, taken)) ++damaged;
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  for (std::size_t place = 0; place < 64; ++place)
    if (const Parcel left = exchange.swap(place, {}); left.words && !open_and_free(pool, left)) ++damaged;

  EXPECT_EQ(damaged, 0);
  const MemoryReport report = pool.report();
  EXPECT_EQ(report.live, MemoryAmounts{});
  EXPECT_EQ(report.live_blocks, 0u);
  EXPECT_EQ(report.allocations, std::size_t{kThreads} * kRounds);
}

// The breakdown at the peak is of one moment: its parts sum to its total, in every report that anyone sees.
TEST(BlockPoolThreads, EveryReportIsOfOneMoment) {
  BlockPool pool({.reserved_bytes = std::size_t{8} << 30});
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads - 1; ++thread)
    threads.emplace_back([&, thread] {
      while (!done)
        pool.deallocate(pool.allocate(1000 + 100'000 * (thread % 2), static_cast<MemoryClass>(thread)));
    });
  const auto sum = [](const MemoryAmounts& amounts) {
    std::size_t total = 0;
    for (const std::size_t bytes : amounts.by_class) total += bytes;
    return total;
  };
  for (int i = 0; i < 2000; ++i) {
    const MemoryReport report = pool.report();
    ASSERT_EQ(sum(report.live), report.live.total);
    ASSERT_EQ(sum(report.at_peak), report.at_peak.total);
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace halfstep
