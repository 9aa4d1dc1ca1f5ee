#include "kernels/norm_loops.h"

namespace halfstep {

constinit const NormRows kScalarNormRows = kLoops;

}  // namespace halfstep
