// What one rank keeps in memory, by class, at the highest moment of a step.
#pragma once

#include <halfstep/memory.h>

#include <string_view>

#include "forecast/arrangement.h"
#include "forecast/device.h"
#include "forecast/precision.h"
#include "forecast/shape.h"

namespace halfstep::forecast {

/// As MemoryReport has it, and the log of a run: each class at its own highest, and the moment when the total
/// is.
struct RankMemory {
  MemoryAmounts class_peaks{};  ///< `total` as in at_peak
  MemoryAmounts at_peak{};
  std::string_view moment{};  ///< of at_peak: "the logits are computed"

  double bytes() const { return static_cast<double>(at_peak.total); }
};

/// Without dropout. docs/forecast.md says what is counted.
RankMemory memory_per_rank(const ModelShape& shape, const PrecisionPlan& precision,
                           const Arrangement& arrangement, const Device& device);

}  // namespace halfstep::forecast
