#include "log/crc32c.h"

#include <array>
#include <bit>

namespace halfstep::log {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41, its bits reversed

constexpr std::array<uint32_t, 256> table_of_bytes() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
    table[byte] = rest;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = table_of_bytes();

}  // namespace

// A byte at a time: events have some fifty of them, histograms a few thousand.
uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8; }

}  // namespace halfstep::log
