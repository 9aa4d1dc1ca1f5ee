#include "support/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace bench {
namespace {

constexpr int kBursts = 20;

typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));

// Twelve sums that do not wait for each other: two ports, and four to five cycles for each.
constexpr int kSums = 12;

/// Returns something of all sums, so that none is left out. Compiled with contraction: see CMakeLists.txt.
template <typename Vector>
[[gnu::always_inline]] inline float multiply_and_add(std::int64_t rounds) {
  Vector sums[kSums], factor{}, addend{};
  factor += 0.5F, addend += 1.0F;
  // From 3 on: 2 would stay 2, and a compiler sees that.
  for (int i = 0; i < kSums; ++i) sums[i] = addend * static_cast<float>(i + 3);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + addend;
  }
  for (int i = 1; i < kSums; ++i) sums[0] += sums[i];
  return sums[0][0];
}

__attribute__((target("avx512f,fma"))) float burst_avx512(std::int64_t rounds) {
  return multiply_and_add<Sixteen>(rounds);
}
__attribute__((target("avx2,fma"))) float burst_avx2(std::int64_t rounds) {
  return multiply_and_add<Eight>(rounds);
}
float burst_baseline(std::int64_t rounds) { return multiply_and_add<Eight>(rounds); }

constexpr std::int64_t kRounds = 1 << 18;  // some milliseconds

struct Burst {
  float (*run)(std::int64_t rounds);
  std::int64_t rounds;
  double operations;  // of one round

  double all_operations() const { return operations * static_cast<double>(rounds); }
};

Burst fp32_burst() {
  if (__builtin_cpu_supports("avx512f")) return {burst_avx512, kRounds, 2.0 * 16 * kSums};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {burst_avx2, kRounds, 2.0 * 8 * kSums};
  return {burst_baseline, kRounds, 2.0 * 8 * kSums};
}

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Four sums of 16 x 16 from tiles of zeros.
float burst_amx(std::int64_t rounds) {
  const TileConfiguration full;
  asm volatile("ldtilecfg %0" : : "m"(full));
  for (std::int64_t round = 0; round < rounds; ++round) {
    asm volatile(
        "tdpbf16ps %tmm4, %tmm5, %tmm0\n\t"
        "tdpbf16ps %tmm6, %tmm5, %tmm1\n\t"
        "tdpbf16ps %tmm4, %tmm7, %tmm2\n\t"
        "tdpbf16ps %tmm6, %tmm7, %tmm3");
  }
  asm volatile("tilerelease");
  return 0;
}

/// In threads of their own: those of LibTorch count on the tiles that they have configured.
double peak(const Burst& burst, int threads) {
  double best = 0;
  for (int i = 0; i < kBursts; ++i) {
    std::atomic<int> waiting{threads};
    std::atomic<float> sum{0};
    std::vector<double> seconds(static_cast<std::size_t>(threads));
    std::vector<std::thread> all;
    for (double& each : seconds)
      all.emplace_back([&] {
        --waiting;
        while (waiting > 0) std::this_thread::yield();
        const auto begin = std::chrono::steady_clock::now();
        sum = burst.run(burst.rounds);
        each = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      });
    for (std::thread& each : all) each.join();
    best =
        std::max(best, threads * burst.all_operations() / *std::max_element(seconds.begin(), seconds.end()));
  }
  return best;
}

}  // namespace

double fp32_peak(int threads) { return peak(fp32_burst(), threads); }

double amx_bf16_peak(int threads) { return peak({burst_amx, kRounds / 16, 4.0 * 2 * 16 * 16 * 32}, threads); }

}  // namespace bench
