// The loops of QuantiseRows, for the compiler to make vectors of. Each ISA's file includes this once; all is
// local to that file, see avx512.cpp for why.
#pragma once

#include <bit>

#include "kernels/cast_constants.h"
#include "kernels/kernel_table.h"

namespace halfstep {
namespace {

inline float loaded(const float* values, std::size_t i) { return values[i]; }
inline float loaded(const std::uint16_t* values, std::size_t i) {
  return std::bit_cast<float>(std::uint32_t{values[i]} << 16);
}

template <typename Value>
void raise(const void* given, std::uint32_t* __restrict magnitudes, std::size_t count) {
  const auto* __restrict values = static_cast<const Value*>(given);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(loaded(values, i)) & ~kFp32Sign;
    magnitudes[i] = magnitude > magnitudes[i] ? magnitude : magnitudes[i];
  }
}

template <typename Value>
std::uint32_t largest(const void* given, std::size_t count) {
  const auto* __restrict values = static_cast<const Value*>(given);
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(loaded(values, i)) & ~kFp32Sign;
    found = magnitude > found ? magnitude : found;
  }
  return found;
}

/// The code of a product. Where neighbours are as far apart as the smallest code, adding a number whose own
/// neighbours are that far apart rounds; elsewhere the bits that go are rounded as a whole number.
template <Format format>
inline std::uint32_t code_of(float product, std::uint32_t& saturated, std::uint32_t& vanished) {
  constexpr CastConstants k = cast_constants(format);
  constexpr int kDropped = 23 - k.mantissa_bits;
  constexpr std::uint32_t kFirstNormal = k.first_normal << 23;
  constexpr float kRounding = k.min_subnormal * 0x1p23f;
  const auto bits = std::bit_cast<std::uint32_t>(product);
  const std::uint32_t magnitude = bits & ~kFp32Sign;
  const std::uint32_t normal =
      ((magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1)) >> kDropped) -
      ((k.first_normal - 1) << k.mantissa_bits);
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kRounding) -
                                  std::bit_cast<std::uint32_t>(kRounding);
  std::uint32_t code = magnitude < kFirstNormal ? subnormal : normal;
  // One sum each, so that the compiler finds no branch.
  saturated += (code > k.max_code ? 1u : 0u) - (magnitude >= kFp32Inf ? 1u : 0u);
  vanished += (code == 0 ? 1u : 0u) - (magnitude == 0 ? 1u : 0u);
  code = code > k.max_code ? k.max_code : code;
  // What a format has no code for is held at max: its block's scale tells.
  constexpr std::uint32_t kInf = k.inf_code < k.nan_code ? k.inf_code : k.nan_code;
  code = magnitude == kFp32Inf ? kInf : code;
  code = magnitude > kFp32Inf ? k.nan_code : code;
  return code | ((bits >> 31) << k.sign_position);
}

template <Format format, typename Value>
void encode(const void* given, const float* __restrict factors, std::uint8_t* __restrict codes,
            std::size_t count, std::uint32_t* counts) {
  const auto* __restrict values = static_cast<const Value*>(given);
  std::uint32_t saturated = 0, vanished = 0;
  for (std::size_t i = 0; i < count; ++i)
    codes[i] =
        static_cast<std::uint8_t>(code_of<format>(loaded(values, i) * factors[i], saturated, vanished));
  counts[0] += saturated;
  counts[1] += vanished;
}

template <Format format>
inline float value_of(std::uint32_t code) {
  constexpr CastConstants k = cast_constants(format);
  const std::uint32_t magnitude = code & ((1u << k.sign_position) - 1);
  const std::uint32_t normal = (magnitude << (23 - k.mantissa_bits)) + ((127u - k.bias) << 23);
  const auto subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(magnitude)) * k.min_subnormal);
  std::uint32_t bits = magnitude < (1u << k.mantissa_bits) ? subnormal : normal;
  bits = magnitude == k.inf_code ? kFp32Inf : bits;
  bits = magnitude >= k.first_nan_magnitude ? kFp32QuietNan : bits;
  return std::bit_cast<float>(bits | ((code >> k.sign_position) << 31));
}

inline void store(float* output, float value) { *output = value; }
inline void store(std::uint16_t* output, float value) {
  *output = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

template <Format format, typename Output>
void decode(const std::uint8_t* __restrict codes, const float* __restrict factors, void* given,
            std::size_t count) {
  auto* __restrict output = static_cast<Output*>(given);
  for (std::size_t i = 0; i < count; ++i) store(output + i, value_of<format>(codes[i]) * factors[i]);
}

template <Format format>
constexpr QuantiseRows::OfFormat rows_of() {
  return {.encode = {encode<format, float>, encode<format, std::uint16_t>},
          .decode = {decode<format, float>, decode<format, std::uint16_t>}};
}

constexpr QuantiseRows kRows = {
    .raise = {raise<float>, raise<std::uint16_t>},
    .largest = {largest<float>, largest<std::uint16_t>},
    .of_format = {rows_of<Format::E4M3>(), rows_of<Format::E5M2>(), rows_of<Format::E2M1>()}};

}  // namespace
}  // namespace halfstep
