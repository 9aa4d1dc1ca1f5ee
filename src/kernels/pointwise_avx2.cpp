#include "kernels/pointwise_loops.h"

namespace halfstep {

constinit const PointwiseLoops kAvx2Pointwise = kLoops;

}  // namespace halfstep
