// What one training step of a GPT holds in memory, by scheme. One measurement a process: the allocator and
// its peaks belong to the process.
#pragma once

#include <halfstep/memory.h>
#include <halfstep/precision.h>
#include <halfstep/storage.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/gpt.h"

namespace bench {

struct MemoryScheme {
  std::string name;
  std::optional<halfstep::Precision> precision =
      {};  ///< none: FP32 by LibTorch alone, with torch::optim::AdamW
  halfstep::MomentStorage moments = halfstep::MomentStorage::Fp32;
  BlockActivations activations = BlockActivations::Kept;
  bool last_block_only = false;  ///< every other parameter is frozen
};

/// FP32 by LibTorch alone first.
const std::vector<MemoryScheme>& memory_schemes();

struct MemoryCase {
  std::string name;
  GptShape shape;
  std::int64_t sequences;  ///< each as long as the context
};

const std::vector<MemoryCase>& memory_cases();

struct MemoryFound {
  std::int64_t parameters = 0;
  std::int64_t trained = 0;                     ///< of these, without the frozen ones
  halfstep::MemoryAmounts after_backward = {};  ///< live bytes, when gradients and moments are both there
  halfstep::MemoryAmounts at_peak = {};         ///< of the whole second step

  /// Working copy, master, gradient and moments, after backward.
  double bytes_per_parameter() const;
};

MemoryFound measure(const MemoryCase& what, const MemoryScheme& scheme);

}  // namespace bench
