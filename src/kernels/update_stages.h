// The stages of an optimizer step as functions over short arrays, one set an ISA.
//
// update.cpp walks a run in tiles that stay in the first-level cache: some stages bring a tile to FP32, one
// computes, some round it back. Six storages of weights, three of moments, three types of gradients and two
// optimizers are then twenty small functions an ISA, where one fused loop for each would be two hundred.
// Casts and random words are the KernelTable's own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace halfstep {

struct AdamWStep;
struct SgdStep;
struct UpdateCounts;
struct UpdateRun;

/// One tile in FP32. `grad` is multiplied already; moments are updated in place; null where there is none.
struct UpdateTile {
  const float* weight;
  const float* grad;
  float* first_moment;
  float* second_moment;
  float* next_weight;
  float* update;  // what the step asks to add to the weight, decay included
};

/// How a moment is rounded: up where its fraction, in units of 2^-32, plus a dither carries. The dither of an
/// element is its random word (the second moment takes the halves of the word exchanged) plus `phase`.
struct Dither {
  const std::uint32_t* words;
  std::uint32_t phase;
};

inline constexpr std::size_t kSquareLanes = 16;

/// Indices into UpdateStages: the types of gradients, and which moment.
inline constexpr int kFp32Grads = 0, kBf16Grads = 1, kFp16Grads = 2;
inline constexpr int kFirst = 0, kSecond = 1;

/// The storages of weights that have a fused AdamW: Fp32, Fp32Master and SplitMaster, the first of the enum.
inline constexpr int kFusedStorages = 3;

struct UpdateStages {
  // lanes[i % 16] += value[i]^2, each product exact.
  void (*sum_of_squares[3])(const void* grads, std::size_t count, double* lanes);
  // Also loads working copies and compensations, multiplied by 1.
  void (*load_grads[3])(const void* grads, float multiplier, float* values, std::size_t count);
  void (*accumulate[3])(const void* grads, float* sum, std::size_t count);

  void (*adamw)(const AdamWStep& step, const UpdateTile& tile, std::size_t count);
  // The whole step in one loop, for BF16 working copies and FP32 moments. Returns how many elements it did:
  // the stages do the rest. Null where the stages do all.
  std::size_t (*fused_adamw[kFusedStorages][3])(const AdamWStep& step, const UpdateRun& run,
                                                UpdateCounts& counts);
  void (*sgd)(const SgdStep& step, const UpdateTile& tile, std::size_t count);

  // The FP32 master as a BF16 working copy and the 16 bits that, sign-extended, are added below it.
  void (*join)(const std::uint16_t* working, const std::uint16_t* remainder, float* master,
               std::size_t count);
  void (*split)(const float* master, std::uint16_t* working, std::uint16_t* remainder, std::size_t count);

  // Nearest even, as the KernelTable's cast, which does it for every format and takes four times as long.
  void (*round_bf16)(const float* values, std::uint16_t* codes, std::size_t count);

  // Kahan's two sums: a + b, and what is left of `addend` where `before` has become `after`.
  void (*add)(const float* a, const float* b, float* sum, std::size_t count);
  void (*left_of)(const float* addend, const float* before, const float* after, float* left,
                  std::size_t count);

  void (*round_bf16_moment[2])(const float* values, Dither dither, std::uint16_t* codes, std::size_t count);
  // Blockwise codes, see moment_codes.h; one scale.
  float (*block_scale[2])(const float* values, std::size_t count);
  void (*round_block_moment[2])(const float* values, float scale, Dither dither, std::uint8_t* codes,
                                std::size_t count);
  void (*load_block_moment[2])(const std::uint8_t* codes, float scale, float* values, std::size_t count);

  // How many updates are numbers other than 0; how many of these met equal codes before and after.
  std::size_t (*nonzero)(const float* update, std::size_t count);
  std::size_t (*unmoved_words)(const float* update, const float* before, const float* after,
                               std::size_t count);
  std::size_t (*unmoved_codes)(const float* update, const std::uint16_t* before, const std::uint16_t* after,
                               std::size_t count);
};

extern const UpdateStages kScalarUpdateStages;
extern const UpdateStages kAvx2UpdateStages;    // run only where cpu_features().avx2
extern const UpdateStages kAvx512UpdateStages;  // run only where cpu_features().avx512

}  // namespace halfstep
