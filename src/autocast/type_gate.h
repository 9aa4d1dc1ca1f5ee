// Whether a scope may open with a type on this machine.
#pragma once

#include <c10/core/ScalarType.h>
#include <halfstep/autocast.h>
#include <halfstep/machine.h>

namespace halfstep {

/// How BF16 is computed where the machine does its work: on its GPUs, the least able of them, when LibTorch
/// sees any; else on the CPU.
PrecisionSupport bf16_support(const Machine& machine);

/// Throws an Error that says what to use instead when the scope must not open.
void check_may_open(c10::ScalarType low, const AutocastOptions& options, const PrecisionSupport& bf16);

}  // namespace halfstep
