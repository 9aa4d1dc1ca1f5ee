#include "forecast/device.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>

namespace halfstep::forecast {
namespace {

TEST(Device, EveryOneSaysWhereItsNumbersAreFrom) {
  for (const Device& device : known_devices()) {
    EXPECT_GE(device.sources.size(), 2u) << device.name;
    EXPECT_GT(device.flops(Operands::Bf16), 0) << device.name;
    EXPECT_TRUE(device.bf16_peak_flops == 0 || device.bf16_flops <= device.bf16_peak_flops) << device.name;
  }
}

TEST(Device, AFileGivesBackTheSameNumbers) {
  const Device& h100 = device_named("h100");
  const Device read = read_device(to_json(h100), "h100.json");
  EXPECT_EQ(to_json(read), to_json(h100));
  EXPECT_EQ(read.between_nodes.bytes_per_second, h100.between_nodes.bytes_per_second);
}

TEST(Device, AFileWithAKeyThatIsNotKnownOrMissingIsRefused) {
  std::string file = to_json(device_named("h100"));
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string changed = file;
    return changed.replace(changed.find(from), from.size(), to);
  };
  EXPECT_THROW(read_device(replaced("bf16_flops", "bf61_flops"), "x"), Error);
  EXPECT_THROW(read_device(replaced("\"ranks_per_node\": 8", "\"ranks_per_node\": 0"), "x"), Error);
  EXPECT_THROW(read_device("[]", "x"), Error);
}

TEST(Device, ProductsThatItHasNotAreRefusedByName) {
  try {
    (void)device_named("a100").flops(Operands::Fp8);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a100 has no fp8"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace halfstep::forecast
