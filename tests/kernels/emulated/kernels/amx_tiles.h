// AMX's tiles as arrays, with the functions of src/kernels/amx_tiles.h, so that the files that use tiles can
// be tested on machines without them. What the instruction TDPBF16PS does to a sum: pairs in order, each
// product added with one rounding, subnormal numbers as zeros (Intel's manual, volume 2).
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Other names, because the library has the real ones. The table's header declares them.
#define kAmxAttention kEmulatedAmxAttention
#define kAmxProduct kEmulatedAmxProduct

namespace halfstep {
namespace {

inline thread_local bool tiles_are_configured = false;
inline thread_local unsigned char tiles[8][16][64];

struct Tiles {
  static void configure() {
    tiles_are_configured = true;
    std::memset(tiles, 0, sizeof(tiles));
  }
  static void release() { tiles_are_configured = false; }

  template <int tile>
  static void zero() {
    expect_configured();
    std::memset(tiles[tile], 0, sizeof(tiles[tile]));
  }
  template <int tile>
  static void load(const void* rows, std::size_t row_bytes) {
    expect_configured();
    for (std::size_t r = 0; r < 16; ++r)
      std::memcpy(tiles[tile][r], static_cast<const char*>(rows) + r * row_bytes, 64);
  }
  template <int tile>
  static void load_once(const void* rows, std::size_t row_bytes) {
    load<tile>(rows, row_bytes);
  }
  template <int tile>
  static void store(void* rows, std::size_t row_bytes) {
    expect_configured();
    for (std::size_t r = 0; r < 16; ++r)
      std::memcpy(static_cast<char*>(rows) + r * row_bytes, tiles[tile][r], 64);
  }
  template <int sum, int left, int right>
  static void multiply() {
    expect_configured();
    for (std::size_t r = 0; r < 16; ++r)
      for (std::size_t c = 0; c < 16; ++c) {
        float total = flushed(number<float>(tiles[sum][r], c));
        for (std::size_t k = 0; k < 16; ++k)
          for (std::size_t half = 0; half < 2; ++half)
            total = flushed(
                std::fma(bf16(tiles[left][r], 2 * k + half), bf16(tiles[right][k], 2 * c + half), total));
        std::memcpy(tiles[sum][r] + c * sizeof(float), &total, sizeof(float));
      }
  }

  static __m512i rounded(__m512 low, __m512 high) {
    alignas(64) std::uint32_t bits[32];
    alignas(64) std::uint16_t codes[32];
    _mm512_store_ps(bits, low);
    _mm512_store_ps(bits + 16, high);
    for (int i = 0; i < 32; ++i) {
      const bool is_nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
      codes[i] = static_cast<std::uint16_t>(is_nan ? (bits[i] >> 16) | 0x40u
                                                   : (bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u)) >> 16);
    }
    return _mm512_load_si512(codes);
  }

 private:
  template <typename Number>
  static Number number(const unsigned char* row, std::size_t i) {
    Number value;
    std::memcpy(&value, row + i * sizeof(Number), sizeof(Number));
    return value;
  }
  static float bf16(const unsigned char* row, std::size_t i) {
    const std::uint32_t bits = std::uint32_t{number<std::uint16_t>(row, i)} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return flushed(value);
  }
  static float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0.0F * value : value; }
  static void expect_configured() {
    if (tiles_are_configured) return;
    std::fputs("a tile was used while none are configured: SIGILL on a machine that has them\n", stderr);
    std::abort();
  }
};

}  // namespace
}  // namespace halfstep
