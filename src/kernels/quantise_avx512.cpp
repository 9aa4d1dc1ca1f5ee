#include "kernels/quantise_loops.h"

namespace halfstep {

constinit const QuantiseRows kAvx512QuantiseRows = kRows;

}  // namespace halfstep
