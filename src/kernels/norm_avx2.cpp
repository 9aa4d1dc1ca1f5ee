#include "kernels/norm_loops.h"

namespace halfstep {

constinit const NormRows kAvx2NormRows = kLoops;

}  // namespace halfstep
