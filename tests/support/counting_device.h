// An accelerator for tests, on LibTorch's PrivateUse1 key. It computes with the CPU's kernels and behaves
// like a GPU:
//
//  - The host cannot read its memory: its addresses are never mapped, and reading one is a segmentation
//  fault.
//  - It counts what the host launches, how often the host waits for it and why, and the bytes that are
//  copied.
//  - It refuses what CUDA refuses: tensors of the CPU among its own, operations without a CUDA kernel, and
//    combinations of types that CUDA's kernels do not take.
//  - A non-blocking copy to the host arrives at the next wait. Until then its target holds 0xFF bytes. The
//    source of a non-blocking copy from the host must not change before the next wait.
//
// Random numbers are those of the CPU's default generator, so that one seed gives the same on both.
//
// Linking it into a program registers it, under the name "counting".
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace halfstep::testing {

inline const at::Device kCountingDevice{at::kPrivateUse1, 0};

/// Where the tests of tests/device run: HALFSTEP_TEST_DEVICE, a name such as cuda:0, or else the test
/// accelerator. What counts, and what compares bits, is for the latter alone.
at::Device device_under_test();
inline bool on_counting_device() { return device_under_test() == kCountingDevice; }

struct DeviceCounts {
  int64_t launches = 0;  ///< operations that ran on the device; one of CUDA's may be several kernels
  int64_t waits = 0;     ///< of the host for the device
  int64_t bytes_to_host = 0, bytes_to_device = 0;
  std::map<std::string, int64_t> launches_of{};  ///< by operation
  std::map<std::string, int64_t> waits_for{};    ///< by cause
};

/// Those that it refuses because CUDA has no kernel for them, with their overloads.
std::vector<std::string> ops_without_cuda_kernel();

/// Since the process began, or since the last reset.
DeviceCounts device_counts();
void reset_device_counts();

/// While one lives, in any thread, a wait for the test accelerator throws an at::Error that names its cause.
class NoWaits {
 public:
  NoWaits();
  ~NoWaits();
  NoWaits(const NoWaits&) = delete;
  NoWaits& operator=(const NoWaits&) = delete;
};

/// A host without instructions for BF16 or FP16 takes the device's products of them in FP32, as a scope does
/// on the CPU. While one of these lives they are LibTorch's own, as they are on the CPU without a scope.
class StockProducts {
 public:
  StockProducts();
  ~StockProducts();
  StockProducts(const StockProducts&) = delete;
  StockProducts& operator=(const StockProducts&) = delete;
};

/// As a program would wait for the device; counted.
void wait_for_counting_device();

/// The values, as a CPU tensor, for a test's eyes: of the test accelerator neither counted nor a wait.
at::Tensor peek(const at::Tensor& tensor);

}  // namespace halfstep::testing
