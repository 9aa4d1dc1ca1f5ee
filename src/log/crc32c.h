// CRC-32C, Castagnoli's, as in iSCSI (RFC 3720) and in TFRecord.
#pragma once

#include <cstdint>
#include <string_view>

namespace halfstep::log {

uint32_t crc32c(std::string_view bytes);

/// As TFRecord stores it, so that the CRC of bytes which hold a CRC is not degenerate.
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace halfstep::log
