#include "tensor/machine_probes.h"

#include <gtest/gtest.h>

extern "C" int fake_cuda_device_count;

namespace halfstep {
namespace {

TEST(CudaDriver, TellsNameAndComputeCapabilityAndLeavesOutADeviceThatFails) {
  const auto devices = cuda_driver_devices();
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(devices[0].name, "Tesla T4");
  EXPECT_EQ(devices[0].major, 7);
  EXPECT_EQ(devices[0].minor, 5);
  EXPECT_EQ(devices[1].name, "NVIDIA H100");
  EXPECT_EQ(devices[1].major, 9);
  EXPECT_EQ(devices[1].minor, 0);
}

TEST(CudaDriver, ADriverWithoutDevicesGivesNone) {
  fake_cuda_device_count = 0;
  EXPECT_TRUE(cuda_driver_devices().empty());
  fake_cuda_device_count = 3;
}

}  // namespace
}  // namespace halfstep
