#include "kernels/norm_loops.h"

namespace halfstep {

constinit const NormRows kAvx512NormRows = kLoops;

}  // namespace halfstep
