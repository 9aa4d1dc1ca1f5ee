// Whether a scope may open with a type on this machine.
#pragma once

#include <c10/core/ScalarType.h>
#include <halfstep/autocast.h>
#include <halfstep/machine.h>

namespace halfstep {

/// Throws an Error that says what to use instead unless this is a type that a scope can lower to.
void check_can_be_low(c10::ScalarType low);

/// Looked at when first asked for.
const Machine& this_machine();

/// The least that the devices offer where the machine does its work.
PrecisionSupport worst_support(const Machine& machine, const std::string& precision);

/// Throws an Error that says what to use instead unless BF16 is native where the machine does its work: on
/// its GPUs, all of them, when LibTorch sees any; else on the CPU.
void check_bf16_is_native(const Machine& machine);

}  // namespace halfstep
