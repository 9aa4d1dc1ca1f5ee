// Who computes what Halfstep computes itself, gradients looked at, weights updated and operations of our own:
// our kernels on the CPU, ATen's operations on every other device. This is the one place that decides.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>

namespace halfstep {

bool kernels_serve(const at::Tensor& tensor);

/// While one lives, ATen's operations serve the CPU too, in objects that are built meanwhile and in all
/// threads: the twin that the kernels, and other devices, are compared with.
class HALFSTEP_API AtenOnCpu {
 public:
  AtenOnCpu();
  ~AtenOnCpu();
  AtenOnCpu(const AtenOnCpu&) = delete;
  AtenOnCpu& operator=(const AtenOnCpu&) = delete;
};

}  // namespace halfstep
