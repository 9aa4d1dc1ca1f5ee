#include "tensor/machine_probes.h"

#include <dlfcn.h>

namespace halfstep {
namespace {

// From the CUDA Driver API reference: CUresult 0 is success; CUdevice and CUdevice_attribute are ints.
constexpr int kSuccess = 0;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

std::vector<DriverDevice> cuda_driver_devices() {
  // Never closed: LibTorch and its allocators go on using the driver.
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return {};
  const auto init = find<int(unsigned)>(driver, "cuInit");
  const auto get_count = find<int(int*)>(driver, "cuDeviceGetCount");
  const auto get_device = find<int(int*, int)>(driver, "cuDeviceGet");
  const auto get_name = find<int(char*, int, int)>(driver, "cuDeviceGetName");
  const auto get_attribute = find<int(int*, int, int)>(driver, "cuDeviceGetAttribute");
  if (!init || !get_count || !get_device || !get_name || !get_attribute) return {};

  int count = 0;
  if (init(0) != kSuccess || get_count(&count) != kSuccess) return {};
  std::vector<DriverDevice> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    char name[256] = "";
    DriverDevice found;
    if (get_device(&device, ordinal) != kSuccess || get_name(name, sizeof name, device) != kSuccess ||
        get_attribute(&found.major, kComputeCapabilityMajor, device) != kSuccess ||
        get_attribute(&found.minor, kComputeCapabilityMinor, device) != kSuccess) {
      continue;
    }
    found.name = name;
    devices.push_back(found);
  }
  return devices;
}

namespace {

constexpr auto kNative = Support::Native;
constexpr auto kEmulated = Support::Emulated;
constexpr auto kUnavailable = Support::Unavailable;

PrecisionSupport fp32_on_cpu(const CpuFeatures& cpu) {
  return {"FP32", kNative, cpu.avx512 ? "AVX-512" : cpu.avx2 ? "AVX2" : "baseline x86-64"};
}

// Read from the code that oneDNN 3.12 generates; tests/cli/env_test.py reads it again on each machine.
PrecisionSupport bf16_on_cpu(const CpuFeatures& cpu, bool with_onednn) {
  if (!with_onednn) return {"BF16", kEmulated, "this LibTorch has no oneDNN: computed in FP32"};
  if (cpu.amx_bf16) return {"BF16", kNative, "AMX-BF16 tiles, by oneDNN"};
  if (cpu.avx512_bf16) return {"BF16", kNative, "AVX512-BF16 dot products, by oneDNN; no AMX-BF16"};
  return {"BF16", kEmulated, "no AMX-BF16, no AVX512-BF16: widened to FP32 first"};
}

// AVX512-FP16 could multiply in FP16, but oneDNN uses it only to widen: the products are FP32's.
PrecisionSupport fp16_on_cpu(const CpuFeatures& cpu, bool with_onednn) {
  if (!with_onednn) return {"FP16", kEmulated, "this LibTorch has no oneDNN: computed in FP32"};
  if (cpu.amx_fp16) return {"FP16", kNative, "AMX-FP16 tiles, by oneDNN"};
  return {"FP16", kEmulated, "no AMX-FP16: widened to FP32 and multiplied there"};
}

}  // namespace

std::vector<PrecisionSupport> cpu_precisions(const CpuFeatures& cpu, bool with_onednn) {
  return {
      fp32_on_cpu(cpu),
      {"TF32", kUnavailable, "LibTorch 2.13 computes in FP32 here when asked for it"},
      bf16_on_cpu(cpu, with_onednn),
      fp16_on_cpu(cpu, with_onednn),
  };
}

// Capabilities: CUDA C++ Programming Guide, "Arithmetic Instructions" and "Tensor Core Feature Support".
std::vector<PrecisionSupport> cuda_precisions(int major, int minor) {
  const int capability = 10 * major + minor;
  std::vector<PrecisionSupport> all = {{"FP32", kNative, "CUDA cores"}};
  if (capability >= 80) {
    for (const char* name : {"TF32", "BF16", "FP16"}) all.push_back({name, kNative, "tensor cores"});
    return all;
  }
  all.push_back({"TF32", kUnavailable, "needs compute capability 8.0"});
  all.push_back({"BF16", kEmulated, "native from compute capability 8.0: use FP16 with loss scaling"});
  if (capability >= 70) {
    all.push_back({"FP16", kNative, "tensor cores"});
  } else if (capability >= 53) {
    all.push_back({"FP16", kNative, "CUDA cores; tensor cores need compute capability 7.0"});
  } else {
    all.push_back({"FP16", kEmulated, "CUDA cores, in FP32; native from compute capability 5.3"});
  }
  return all;
}

}  // namespace halfstep
