// The part of protobuf's wire format that event files need: https://protobuf.dev/programming-guides/encoding.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace halfstep::log {

static_assert(std::endian::native == std::endian::little,
              "fixed-width fields are copied as they are in memory");

template <typename Number>
void put_fixed(std::string& out, Number value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// One message, field by field.
class Message {
 public:
  void clear() { bytes_.clear(); }
  std::string_view bytes() const { return bytes_; }

  void integer(uint32_t field, int64_t value) {
    tag(field, 0);
    varint(static_cast<uint64_t>(value));
  }
  void fixed(uint32_t field, double value) {
    tag(field, 1);
    put_fixed(bytes_, value);
  }
  void fixed(uint32_t field, float value) {
    tag(field, 5);
    put_fixed(bytes_, value);
  }
  /// A string, or a message within.
  void block(uint32_t field, std::string_view content) {
    tag(field, 2);
    varint(content.size());
    bytes_ += content;
  }
  void packed(uint32_t field, std::span<const double> values) {
    block(field, {reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  }

 private:
  void tag(uint32_t field, uint32_t wire_type) { varint(field << 3 | wire_type); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

}  // namespace halfstep::log
