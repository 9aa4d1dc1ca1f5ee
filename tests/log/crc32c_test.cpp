#include "log/crc32c.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

namespace halfstep::log {
namespace {

// RFC 3720, appendix B.4. Its bytes are in the order of transmission: least significant first.
TEST(Crc32c, HasTheCheckValuesOfRfc3720) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string ascending(32, '\0');
  std::iota(ascending.begin(), ascending.end(), '\0');
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
  EXPECT_EQ(crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cu);
  // An iSCSI SCSI Read (10) Command PDU.
  const unsigned char read_command[48] = {0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0,
                                          0x14, 0,    0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
                                          0x28, 0,    0, 0, 0, 0, 0, 0, 2, 0, 0, 0,    0, 0, 0, 0};
  EXPECT_EQ(crc32c({reinterpret_cast<const char*>(read_command), sizeof read_command}), 0xd9963a56u);
}

// The usual check value, of the catalogue of CRC algorithms.
TEST(Crc32c, HasTheCheckValueOfTheCatalogue) { EXPECT_EQ(crc32c("123456789"), 0xe3069283u); }

TEST(Crc32c, OfNothingIsZero) { EXPECT_EQ(crc32c(""), 0u); }

}  // namespace
}  // namespace halfstep::log
