// Stands in for libcuda.so.1: a T4 (7.5), a device that fails to answer, and an H100 (9.0). Signatures as in
// the CUDA Driver API reference.
#include <cstdio>

extern "C" {

__attribute__((visibility("default"))) int fake_cuda_device_count = 3;

__attribute__((visibility("default"))) int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }

__attribute__((visibility("default"))) int cuDeviceGetCount(int* count) {
  *count = fake_cuda_device_count;
  return 0;
}

// Handles differ from ordinals, so that code which confuses the two is seen.
__attribute__((visibility("default"))) int cuDeviceGet(int* device, int ordinal) {
  *device = 100 + ordinal;
  return ordinal == 1 ? 999 : 0;
}

__attribute__((visibility("default"))) int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, bytes, "%s", device == 100 ? "Tesla T4" : "NVIDIA H100");
  return 0;
}

__attribute__((visibility("default"))) int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute != 75 && attribute != 76) return 1;  // compute capability: major, minor
  const bool is_major = attribute == 75;
  *value = device == 100 ? (is_major ? 7 : 5) : (is_major ? 9 : 0);
  return 0;
}
}
