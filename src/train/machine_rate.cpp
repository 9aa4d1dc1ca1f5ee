#include "train/machine_rate.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>

namespace halfstep::train {
namespace {

double measured_rate(c10::ScalarType type) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kSide = 1024;
  constexpr int kRounds = 8;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::full({kSide, kSide}, 0.5, type), b = at::full({kSide, kSide}, 0.25, type);
  double best_seconds = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = Clock::now();
    const at::Tensor product = at::mm(a, b);
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return 2.0 * kSide * kSide * kSide / best_seconds;
}

}  // namespace

double product_rate(c10::ScalarType type) {
  static std::mutex mutex;
  static std::map<std::pair<c10::ScalarType, int>, double> known;
  const std::lock_guard lock(mutex);
  const auto [rate, is_new] = known.try_emplace({type, at::get_num_threads()});
  if (is_new) rate->second = measured_rate(type);
  return rate->second;
}

}  // namespace halfstep::train
