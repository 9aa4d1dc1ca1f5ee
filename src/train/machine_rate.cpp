#include "train/machine_rate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <chrono>

namespace halfstep::train {

double product_rate(c10::ScalarType type) {
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

}  // namespace halfstep::train
