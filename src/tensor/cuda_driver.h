// Names and compute capabilities of the GPUs, from the CUDA driver.
#pragma once

#include <string>
#include <vector>

namespace halfstep {

struct DriverDevice {
  std::string name;
  int major = 0, minor = 0;
};

/// The devices of the CUDA driver that is installed; none without a driver. The driver's library is
/// looked up at run time: LibTorch's own headers for this need a CUDA toolkit to compile.
std::vector<DriverDevice> cuda_driver_devices();

}  // namespace halfstep
