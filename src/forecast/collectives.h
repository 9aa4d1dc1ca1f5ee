// How long ranks take to exchange something: alpha for each hop, beta for each byte.
#pragma once

#include <cstdint>

#include "forecast/device.h"

namespace halfstep::forecast {

enum class Collective {
  AllReduce,      ///< every rank gets the sum
  ReduceScatter,  ///< every rank gets its part of the sum
  AllGather,      ///< every rank gets all parts
};

/// Seconds for one exchange of `bytes`, counted whole: what an all-gather ends with, and the others begin
/// with. An all-reduce takes the quicker of a ring and a tree, the others a ring.
double collective_seconds(Collective collective, double bytes, int64_t ranks, const Device& device);

}  // namespace halfstep::forecast
