// How long a training step takes: a roofline for what a rank computes, and what of the exchange it waits for.
#pragma once

#include "forecast/arrangement.h"
#include "forecast/device.h"
#include "forecast/precision.h"
#include "forecast/shape.h"

namespace halfstep::forecast {

/// Seconds of one step of one rank.
struct StepTime {
  double forward = 0;    ///< of all micro-batches
  double backward = 0;   ///< and what is computed again for it
  double update = 0;     ///< gradients inspected, weights and moments updated
  double exchanged = 0;  ///< all collectives, one after the other
  double exposed = 0;    ///< of those, what nothing is computed beside

  double computed() const { return forward + backward + update; }
  double total() const { return computed() + exposed; }
};

/// Every product takes the longer of its arithmetic and its traffic to memory; what is no product takes its
/// traffic. Exchanges run beside backward, with sharded weights beside forward too, and take nothing from it.
StepTime step_time(const ModelShape& shape, const PrecisionPlan& precision, const Arrangement& arrangement,
                   const Device& device);

}  // namespace halfstep::forecast
