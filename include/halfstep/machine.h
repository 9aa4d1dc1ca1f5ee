// What works on this machine.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// How matrix products of a precision are computed on a device.
enum class Support {
  Native,       ///< by instructions made for it
  Emulated,     ///< right, but computed in FP32 and rounded: expect no gain in speed
  Unavailable,  ///< not at all
};

/// How one precision is computed on a device.
struct PrecisionSupport {
  std::string precision;  ///< "FP32", "TF32", "BF16" or "FP16"
  Support support = Support::Unavailable;
  std::string reason;  ///< one line: the instructions that are used, or what is missing
};

/// The processor, as this process may use it.
struct CpuReport {
  /// An instruction set.
  struct Feature {
    std::string name;  ///< as Intel writes it: "AVX512-BF16"
    bool present;      ///< on the CPU, and let through by the operating system
  };
  int64_t logical_cpus = 0;  ///< those that this process may run on
  std::vector<Feature> features;
  std::string kernels;  ///< the table that Halfstep's own loops use: "scalar", "avx2", "avx512" or "amx"
  std::vector<PrecisionSupport> precisions;
};

/// The LibTorch of this process.
struct TorchReport {
  std::string built_version;   ///< of the headers that Halfstep was compiled with
  std::string loaded_version;  ///< of the library that answers now; another minor version is not safe
  std::string cpu_kernels;     ///< the instruction set that ATen chose for its own loops: "AVX512"
  std::string onednn_version;  ///< empty: built without oneDNN
  std::string mkl_version;     ///< empty: built without MKL
  bool gloo_built = false;     ///< ProcessGroupGloo is in the library; no connection was tried
  int64_t threads = 0;         ///< within one operation
  int64_t interop_threads = 0;
};

/// One GPU.
struct CudaDevice {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  std::vector<PrecisionSupport> precisions;
};

/// The GPUs that LibTorch sees.
struct CudaReport {
  bool built = false;      ///< into the LibTorch that is loaded
  bool available = false;  ///< and LibTorch finds a device
  std::vector<CudaDevice> devices;
};

/// All that `halfstep env` shows.
struct Machine {
  CpuReport cpu;
  TorchReport torch;
  CudaReport cuda;
  /// Sentences about what does not fit together here, each with what to do. Usually empty.
  std::vector<std::string> warnings;
};

/// Looks at the machine and at the LibTorch of this process. Runs no kernel and changes nothing. Where
/// CUDA devices exist, asking for them starts the CUDA driver.
[[nodiscard]] HALFSTEP_API Machine inspect_machine();

/// "native", "emulated" or "unavailable".
[[nodiscard]] HALFSTEP_API std::string_view to_string(Support support);

}  // namespace halfstep
