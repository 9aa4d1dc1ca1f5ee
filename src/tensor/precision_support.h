// Which instructions compute each precision, told from what a device has.
#pragma once

#include <halfstep/machine.h>

#include "base/cpu_features.h"

namespace halfstep {

/// FP32, TF32, BF16 and FP16, in this order, for matrix products that LibTorch runs on the CPU.
std::vector<PrecisionSupport> cpu_precisions(const CpuFeatures& cpu, bool with_onednn);

/// The same on an NVIDIA GPU of this compute capability.
std::vector<PrecisionSupport> cuda_precisions(int major, int minor);

}  // namespace halfstep
