// How fast this machine multiplies matrices.
#pragma once

#include <c10/core/ScalarType.h>

namespace halfstep::train {

/// Floating-point operations a second in products of square matrices of this type, the best of a few rounds:
/// what `share of the machine's peak` is a share of. Measured once for each type and number of threads: 0.1
/// s.
double product_rate(c10::ScalarType type);

}  // namespace halfstep::train
