// Arrays of BF16 or FP16 to FP32 and back.
#pragma once

#include <cstdint>

#include "kernels/cast.h"
#include "kernels/tiles.h"

namespace halfstep {

inline const void* at_low(const void* codes, std::size_t element) {
  return static_cast<const std::uint16_t*>(codes) + element;
}
inline void* at_low(void* codes, std::size_t element) { return static_cast<std::uint16_t*>(codes) + element; }

inline void load_low(const KernelTable& table, Format format, const void* codes, float* values,
                     std::size_t count) {
  table.update->load_grads[grad_format_index(format)](codes, 1, values, count);
}

/// Nearest even; what is beyond FP16 becomes Inf.
inline void store_low(const KernelTable& table, Format format, const float* values, void* codes,
                      std::size_t count) {
  if (format == Format::BF16) {
    table.update->round_bf16(values, static_cast<std::uint16_t*>(codes), count);
  } else {
    cast({values, count}, format, {.overflow = Overflow::NonFinite}, codes, table);
  }
}

}  // namespace halfstep
