#include "kernels/quantise_loops.h"

namespace halfstep {

constinit const QuantiseRows kScalarQuantiseRows = kRows;

}  // namespace halfstep
