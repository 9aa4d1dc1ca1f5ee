#include "nn/fp8_blocks.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <halfstep/error.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cast.h"
#include "tensor/dense.h"

namespace halfstep {
namespace {

constexpr int64_t kBlocksATask = 64;

int64_t block_count(int64_t elements) { return (elements + kFp8BlockElements - 1) / kFp8BlockElements; }

Format format_of(at::ScalarType type) {
  const auto format = training_format(type);
  if (!format) HALFSTEP_BUG("no FP8 blocks of ", type);
  return *format;
}

/// The largest exponent that brings `largest` to at most `max`; such that 2^exponent and its inverse are
/// normal.
int exponent_for(float largest, double max) {
  if (largest == 0 || !std::isfinite(largest)) return 0;
  int exponent = std::ilogb(max) - std::ilogb(largest);
  if (std::ldexp(static_cast<double>(largest), exponent) > max) --exponent;
  return std::clamp(exponent, -126, 126);
}

/// NaN where there is one: it must not hide behind a comparison.
float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) {
    const float magnitude = std::fabs(value);
    if (!(magnitude <= largest)) largest = magnitude;
    if (std::isnan(largest)) break;
  }
  return largest;
}

/// body(block, first element, element count) for each block, by several threads.
template <typename Body>
void for_each_block(int64_t elements, Body body) {
  at::parallel_for(0, block_count(elements), kBlocksATask, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kFp8BlockElements;
      body(block, first, std::min(kFp8BlockElements, elements - first));
    }
  });
}

}  // namespace

at::Tensor fp8_blocks(const at::Tensor& flat, Format format) {
  const int64_t elements = flat.numel();
  const Format given = format_of(flat.scalar_type());
  at::Tensor bytes = at::empty({elements + block_count(elements)}, flat.options().dtype(at::kByte));
  auto* const codes = bytes.mutable_data_ptr<uint8_t>();
  auto* const exponents = reinterpret_cast<int8_t*>(codes + elements);
  const auto* const source = static_cast<const char*>(flat.const_data_ptr());
  const auto element_bytes = static_cast<int64_t>(flat.element_size());
  for_each_block(elements, [&](int64_t block, int64_t first, int64_t count) {
    std::array<float, kFp8BlockElements> buffer;
    const std::span<float> values(buffer.data(), static_cast<std::size_t>(count));
    if (given == Format::FP32) {
      std::copy_n(reinterpret_cast<const float*>(source) + first, count, values.begin());
    } else {
      decode(source + first * element_bytes, given, values);
    }
    const int exponent = exponent_for(largest_magnitude(values), traits(format).max);
    const float factor = std::ldexp(1.0f, exponent);
    for (float& value : values) value *= factor;
    cast(values, format, {}, codes + first);
    exponents[block] = static_cast<int8_t>(exponent);
  });
  return bytes;
}

void decode_fp8_blocks(const at::Tensor& bytes, Format format, const at::Tensor& flat) {
  const int64_t elements = flat.numel();
  const Format wanted = format_of(flat.scalar_type());
  const auto* const codes = bytes.const_data_ptr<uint8_t>();
  const auto* const exponents = reinterpret_cast<const int8_t*>(codes + elements);
  auto* const target = static_cast<char*>(flat.mutable_data_ptr());
  const auto element_bytes = static_cast<int64_t>(flat.element_size());
  for_each_block(elements, [&](int64_t block, int64_t first, int64_t count) {
    std::array<float, kFp8BlockElements> buffer;
    const std::span<float> values(buffer.data(), static_cast<std::size_t>(count));
    decode(codes + first, format, values);
    const float factor = std::ldexp(1.0f, -exponents[block]);
    for (float& value : values) value *= factor;
    if (wanted == Format::FP32) {
      std::copy(values.begin(), values.end(), reinterpret_cast<float*>(target) + first);
    } else {
      cast(values, wanted, {}, target + first * element_bytes);
    }
  });
}

}  // namespace halfstep
