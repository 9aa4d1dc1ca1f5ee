// What machine.cpp asks: the CUDA driver, and what LibTorch can do in each precision.
#pragma once

#include <halfstep/machine.h>

#include <string>
#include <vector>

#include "base/cpu_features.h"

namespace halfstep {

struct DriverDevice {
  std::string name;
  int major = 0, minor = 0;
};

/// The devices of the CUDA driver that is installed; none without a driver. The driver's library is
/// looked up at run time: LibTorch's own headers for this need a CUDA toolkit to compile.
std::vector<DriverDevice> cuda_driver_devices();

/// FP32, TF32, BF16 and FP16, in this order, for matrix products that LibTorch runs on the CPU.
std::vector<PrecisionSupport> cpu_precisions(const CpuFeatures& cpu, bool with_onednn);

/// The same on an NVIDIA GPU of this compute capability.
std::vector<PrecisionSupport> cuda_precisions(int major, int minor);

}  // namespace halfstep
