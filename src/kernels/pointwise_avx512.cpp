#include "kernels/pointwise_loops.h"

namespace halfstep {

constinit const PointwiseLoops kAvx512Pointwise = kLoops;

}  // namespace halfstep
