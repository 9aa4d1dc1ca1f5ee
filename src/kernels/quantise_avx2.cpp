#include "kernels/quantise_loops.h"

namespace halfstep {

constinit const QuantiseRows kAvx2QuantiseRows = kRows;

}  // namespace halfstep
