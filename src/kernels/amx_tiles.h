// AMX's tiles: eight registers of 16 rows of 64 bytes, and products of them.
//
// Written as assembly: g++ 12's intrinsics do not say which memory they read and write. Tests compile
// attention_amx.cpp and product_amx.cpp for machines without AMX against
// tests/kernels/emulated/kernels/amx_tiles.h, which has the same functions.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace halfstep {
namespace {

struct Tiles {
  /// All tiles full size. Others on this thread, as oneDNN, configure theirs again: between configure and
  /// release no code but ours may run.
  static void configure() {
    static constexpr Configuration kFull = {.palette = 1,
                                            .start_row = 0,
                                            .reserved = {},
                                            .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                            .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" : : "m"(kFull));
  }
  static void release() { asm volatile("tilerelease"); }

  template <int tile>
  [[gnu::always_inline]] static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  [[gnu::always_inline]] static void load(const void* rows, std::size_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(row_bytes), "i"(tile) : "memory");
  }
  /// Of rows that are not used again soon: past the first-level cache.
  template <int tile>
  [[gnu::always_inline]] static void load_once(const void* rows, std::size_t row_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(row_bytes), "i"(tile) : "memory");
  }
  template <int tile>
  [[gnu::always_inline]] static void store(void* rows, std::size_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(row_bytes), "i"(tile) : "memory");
  }
  /// sum[row][column] += left[row][2k] * right[k][2 column] + left[row][2k + 1] * right[k][2 column + 1]
  template <int sum, int left, int right>
  [[gnu::always_inline]] static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(left), "i"(right));
  }

  /// Both rounded to BF16, `low` in the lower half.
  [[gnu::always_inline]] static __m512i rounded(__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }

 private:
  struct alignas(64) Configuration {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  };
};

}  // namespace
}  // namespace halfstep
