// What comes of an arrangement, and which one gives the most for a device's time.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "forecast/arrangement.h"
#include "forecast/device.h"
#include "forecast/memory.h"
#include "forecast/step_time.h"

namespace halfstep::forecast {

struct Outcome {
  Arrangement arrangement{};
  RankMemory memory{};
  StepTime time{};
  bool fits = false;
  double tokens_per_second_per_device = 0;
  double share_of_peak = 0;  ///< of the device's BF16 peak, as model flops are counted
};

Outcome outcome_of(const ModelShape& shape, const PrecisionPlan& precision, const Arrangement& arrangement,
                   const Device& device);

/// The largest micro-batch whose memory fits, everything else as in `arrangement`; 0: not even one sequence.
int64_t largest_micro_batch(const ModelShape& shape, const PrecisionPlan& precision,
                            const Arrangement& arrangement, const Device& device);

/// What is asked; what is left open is chosen.
struct Question {
  int64_t ranks = 1;
  int64_t sequence_length = 1024;
  std::optional<Sharding> sharding{};
  std::optional<int64_t> micro_batch{};
  std::optional<bool> recomputes_blocks{};
  /// Sequences of a step on all ranks together; not given: one micro-batch of each rank.
  std::optional<int64_t> batch{};
  int64_t summed_bytes = 4;
  bool packs_weights = false;
};

/// For each sharding that is asked about, the micro-batch that fits and gives the most tokens per second and
/// device, with recomputed blocks or without. One that does not fit at all has its smallest form, with `fits`
/// false. An Error where `batch` cannot be divided by the ranks.
std::vector<Outcome> best_of_each_sharding(const ModelShape& shape, const PrecisionPlan& precision,
                                           const Question& question, const Device& device);

/// The quickest that fits; nothing if none does. Of equally quick ones, within 0.1 %, the one that shards
/// least.
const Outcome* cheapest(const std::vector<Outcome>& outcomes);

}  // namespace halfstep::forecast
