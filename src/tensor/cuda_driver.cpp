#include "tensor/cuda_driver.h"

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

}  // namespace halfstep
