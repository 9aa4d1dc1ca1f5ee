#include "kernels/pointwise_loops.h"

namespace halfstep {

constinit const PointwiseLoops kScalarPointwise = kLoops;

}  // namespace halfstep
