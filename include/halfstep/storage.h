// In which form weights and optimizer moments are kept between steps.
#pragma once

#include <cstdint>
#include <string_view>

namespace halfstep {

/// How a weight is kept. "Low" is BF16 or FP16.
///
/// An update of a weight w smaller than about w * 2^-9 is rounded away in BF16 (w * 2^-12 in FP16), and most
/// updates are. All of these but Nearest keep what a low-precision weight cannot hold.
enum class WeightStorage {
  Fp32,         ///< the working copy is FP32: its own master
  Fp32Master,   ///< low working copy, rounded to nearest even from an FP32 master beside it: 2 + 4 bytes
  SplitMaster,  ///< BF16 working copy, ties rounded away from 0, and the 16 bits below it: together the FP32
                ///< master, bit for bit: 2 + 2 bytes
  Kahan,        ///< low working copy and a compensation of the same type: 2 + 2 bytes. In BF16 updates below
                ///< w * 2^-17 are lost once the compensation has grown
  Stochastic,   ///< low working copy alone, rounded up or down at random, right on average: 2 bytes
  Nearest,      ///< low working copy alone, rounded to nearest: small updates vanish. A control: 2 bytes
};

/// How the moments of an optimizer are kept.
enum class MomentStorage {
  Fp32,        ///< 4 bytes each
  Bf16,        ///< rounded up or down in fair turns, since a moment moves by less than half a BF16 step: 2
               ///< bytes each
  Blockwise8,  ///< 8-bit floating-point codes, rounded alike, an FP32 scale for each 256: 1 + 4/256 bytes
               ///< each. Within a block gradients may differ by a factor of about 300; the weights of those
               ///< that are smaller still move more slowly than they should
};

/// "fp32", "fp32 master", "split master", "kahan", "stochastic", "nearest"; in saved states too.
constexpr std::string_view to_string(WeightStorage storage) {
  constexpr std::string_view names[] = {"fp32",  "fp32 master", "split master",
                                        "kahan", "stochastic",  "nearest"};
  return names[static_cast<int>(storage)];
}

/// "fp32", "bf16", "blockwise 8-bit"; in saved states too.
constexpr std::string_view to_string(MomentStorage storage) {
  constexpr std::string_view names[] = {"fp32", "bf16", "blockwise 8-bit"};
  return names[static_cast<int>(storage)];
}

/// Elements that share a scale in MomentStorage::Blockwise8.
inline constexpr std::int64_t kMomentBlockElements = 256;

}  // namespace halfstep
