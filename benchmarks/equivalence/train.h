// One training run of the byte GPT.
#pragma once

#include <cstdint>

#include "schemes.h"

namespace bench {

struct RunResult {
  double loss = 0;  ///< nats a byte on held-out text, in FP32, from the weights with all their bits
  std::int64_t skipped_steps = 0;
};

/// Weights and batches depend on the seed alone, so runs with the same seed are a pair.
RunResult train(const Scheme& scheme, std::uint64_t seed, std::int64_t steps);

}  // namespace bench
