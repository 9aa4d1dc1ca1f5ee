// Whether a scope may open with a type on a device.
#pragma once

#include <c10/core/ScalarType.h>
#include <halfstep/autocast.h>

#include <string>

#include "base/cpu_features.h"

namespace halfstep {

/// What the gate asks about a machine; a value, so that a test can hand in one that it does not run on.
struct MachineForAutocast {
  CpuFeatures cpu = {};
  bool has_cuda = false;
  bool cuda_has_bf16 = false;  // compute capability 8.0 or more
};

/// The machine that runs us. Asks CUDA only when the device is CUDA.
MachineForAutocast machine_for_autocast(c10::DeviceType device);

/// Throws an Error that says what to use instead when the scope must not open.
void check_may_open(c10::ScalarType low, const AutocastOptions& options, const MachineForAutocast& machine);

}  // namespace halfstep
