// Which checkpoints of a run stay when a new one is saved.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace halfstep::files {

struct Retention {
  int64_t keep_last = 3;   ///< healthy ones; 0 keeps all
  int64_t keep_every = 0;  ///< those of steps that are multiples of it stay for ever; 0: none
  bool keep_best = false;  ///< the one with the lowest score stays
};

struct KeptCheckpoint {
  int64_t step = 0;
  bool healthy = true;
  std::optional<double> score{};
  bool pinned = false;
};

/// Of checkpoints in the order of their steps, those that go. The newest always stays, and so does a pinned
/// one. One that was saved while the run was in trouble is not among the last: as soon as it is not the
/// newest any more it goes, and the last healthy ones are still there to go back to.
std::vector<int64_t> steps_to_remove(const std::vector<KeptCheckpoint>& all, const Retention& retention);

}  // namespace halfstep::files
