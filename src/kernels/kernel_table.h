// The kernels as a table of function pointers over raw arrays, one table an ISA.
//
// Casts and random words are integer arithmetic, or floating-point arithmetic that is exact on normal
// numbers: the state of MXCSR (flush-to-zero, denormals-are-zero, rounding mode) does not change a bit of any
// result.
#pragma once

#include <halfstep/formats.h>

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

struct NormRows {
  // output[i] = values[i] * factor * gain[i]
  void (*scale)(const float* values, float factor, const float* gain, float* output, std::size_t count);
  // The sum of values[i] * grads[i] * gain[i] in FP64, in an order that every ISA has.
  double (*dot)(const float* values, const float* grads, const float* gain, std::size_t count);
  // With n[i] = values[i] * factor, what the norm makes of a value:
  // value_grads[i] = factor * (grads[i] * gain[i] - n[i] * along), gain_grads[i] += grads[i] * n[i]
  void (*backward)(const float* values, const float* grads, const float* gain, float factor, float along,
                   float* value_grads, float* gain_grads, std::size_t count);
};

extern const NormRows kScalarNormRows;
extern const NormRows kAvx2NormRows;    // run only where cpu_features().avx2
extern const NormRows kAvx512NormRows;  // run only where cpu_features().avx512

/// Functions of each element, in FP32. Index 0: arrays of FP32, 1: of BF16, rounded once, to the nearest
/// even. Arrays that are written do not overlap others.
struct PointwiseLoops {
  // output[i] = silu(gate[i]) * up[i]
  void (*swiglu[2])(const void* gate, const void* up, void* output, std::size_t count);
  void (*swiglu_backward[2])(const void* gate, const void* up, const void* grad, void* gate_grad,
                             void* up_grad, std::size_t count);
  // Rows of 2 * half elements, `stride` apart: element i of the first half turns with element i of the
  // second, by angles that are the same for each row. `cos` and `sin` have 2 * half elements too.
  void (*rotate[2])(const void* values, std::size_t stride, void* output, std::size_t output_stride,
                    std::size_t rows, const float* cos, const float* sin, std::size_t half);
  decltype(rotate) rotate_back;  // of the output's gradient: the input's
  // output[i] = gelu(x[i]), by tanh
  void (*gelu[2])(const void* x, void* output, std::size_t count);
  void (*gelu_backward[2])(const void* x, const void* grad, void* x_grad, std::size_t count);
};

extern const PointwiseLoops kScalarPointwise;
extern const PointwiseLoops kAvx2Pointwise;    // run only where cpu_features().avx2
extern const PointwiseLoops kAvx512Pointwise;  // run only where cpu_features().avx512

/// Below it max / amax would not be a number; as torchao has it.
inline constexpr double kLeastAmax = 1e-12;

/// What a scale is made from beside the largest magnitude.
struct ScaleConstants {
  double max;                  // of the codes' format
  std::uint32_t max_fraction;  // the bits after its first, as FP32 has them

  std::int32_t largest_exponent;      // of the codes' format
  float tensor_scale, tensor_encode;  // and its reciprocal: of E4m3 alone
};

/// Rows of a matrix on their way into codes and back. Index 0 is FP32, 1 is BF16.
struct QuantiseRows {
  // magnitudes[i] = max(magnitudes[i], |values[i]|), as FP32 bits: a NaN is the largest.
  void (*raise[2])(const void* values, std::uint32_t* magnitudes, std::size_t count);
  std::uint32_t (*largest[2])(const void* values, std::size_t count);
  // found[b] of the values from b * width on.
  void (*largest_of_blocks[2])(const void* values, std::size_t width, std::size_t blocks,
                               std::uint32_t* found);
  // factors[b * width ...] = of_blocks[b], width times.
  void (*spread)(const float* of_blocks, std::size_t width, std::size_t blocks, float* factors);
  // By ScaleRule: what blocks of these magnitudes are multiplied by, and their scales as they are stored.
  void (*scale_blocks[6])(const std::uint32_t* magnitudes, std::size_t count, const ScaleConstants& constants,
                          void* stored, float* encodes);
  struct OfFormat {
    // codes[i] of values[i] * factors[i]. Adds to counts: how many were held at max, how many became 0.
    void (*encode[2])(const void* values, const float* factors, std::uint8_t* codes, std::size_t count,
                      std::uint32_t* counts);
    decltype(encode) encode_finite;  // where every value is finite
    void (*decode[2])(const std::uint8_t* codes, const float* factors, void* output, std::size_t count);
  };
  OfFormat of_format[3];  // E4M3, E5M2, E2M1
};

extern const QuantiseRows kScalarQuantiseRows;
extern const QuantiseRows kAvx2QuantiseRows;    // run only where cpu_features().avx2
extern const QuantiseRows kAvx512QuantiseRows;  // run only where cpu_features().avx512

inline constexpr std::size_t kSumLanes = 16;

/// The least FP32 magnitudes, as bits, that saturate the formats whose limit StatisticsCounts::places does
/// not tell: BF16 (the tie above its max), FP16 (65520), E4M3 (behind 464, a tie that goes to 448).
// Not inline: the objects of wide ISAs would share it.
constexpr std::uint32_t kSaturates[3] = {0x7f7f8000, 0x477ff000, 0x43e80001};

/// What one pass over values counts.
struct StatisticsCounts {
  double lanes[kSumLanes];  // lanes[i % 16] += value[i], of finite values
  std::uint32_t largest;    // finite magnitude, as FP32 bits
  std::uint64_t nans, infinities;
  // Normal numbers of FP32: four counts for each exponent field, by how many ones the fraction begins with,
  // 0 to 2, or 3 and more; and of these, by exponent field, powers of two and those with ten ones or more.
  std::uint64_t places[1024], powers_of_two[256], ones_10[256];
  std::uint64_t first_ones_7;  // with seven ones, of the first binade of normal numbers
  struct Subnormal {
    std::uint64_t count, powers_of_two, ones[5];  // 1, 2, 3, 7 and 10 ones behind the leading one
  };
  Subnormal subnormals[23];  // by the place of the leading one
  std::uint64_t saturated[3];
};

/// Bins of a pass: one for every value of two neighbouring bytes, or four times one for every byte.
inline constexpr std::size_t kPairBins = 65536, kByteBins = 4 * 256;

struct StatisticsPass {
  // `bins` are 0 before and are left in any state: kPairBins if `pairs`, else kByteBins.
  void (*add[3])(const void* values, std::size_t count, std::uint32_t* bins, bool pairs,
                 StatisticsCounts& counts);
};

extern const StatisticsPass kScalarStatistics;
extern const StatisticsPass kAvx2Statistics;    // run only where cpu_features().avx2
extern const StatisticsPass kAvx512Statistics;  // run only where cpu_features().avx512

/// What an overflowing value and an infinite input become: codes without sign, before TF32's padding.
struct SpecialResults {
  std::uint32_t overflow = 0;
  std::uint32_t inf = 0;
};

/// Whose random bits to use: element i of the array is element first_element + i of the tensor.
struct StochasticStream {
  StochasticKey key;
  std::uint64_t first_element = 0;
};

// Arrays need no alignment beyond that of their elements. A code is stored in 1, 2 or 4 bytes, whichever
// holds it.
using CastKernel = void (*)(const float* values, void* codes, std::size_t count, SpecialResults special);
using StochasticCastKernel = void (*)(const float* values, void* codes, std::size_t count,
                                      SpecialResults special, const StochasticStream& stream);
using DecodeKernel = void (*)(const void* codes, float* values, std::size_t count);
using RandomKernel = void (*)(const StochasticStream& stream, std::uint32_t* words, std::size_t count);

struct FormatKernels {
  CastKernel nearest_even = nullptr;
  CastKernel toward_zero = nullptr;
  StochasticCastKernel stochastic = nullptr;
  DecodeKernel decode = nullptr;
};

struct AttentionCall;

struct HeadOf {
  std::size_t batch, head;
};

/// See kernels/attention.h. `random` gives the words of dropout.
struct AttentionLoops {
  std::size_t (*forward_bytes)(const AttentionCall& call);
  void (*forward)(const AttentionCall& call, RandomKernel random, HeadOf of, std::size_t first_query,
                  std::size_t count, void* scratch);
  std::size_t (*backward_bytes)(const AttentionCall& call, std::size_t most_keys);
  // The keys [first_key, first_key + count) of a key head and the queries of all heads that share it.
  // `query_sums`, [heads, queries, padded head size], gets what they add to the queries' gradient, before
  // the scale; where it is null, these are all keys, and the gradient itself is written.
  void (*backward)(const AttentionCall& call, RandomKernel random, HeadOf key_head, std::size_t first_key,
                   std::size_t count, float* query_sums, void* scratch);
};

extern const AttentionLoops kScalarAttention;
extern const AttentionLoops kAvx2Attention;    // run only where cpu_features().avx2
extern const AttentionLoops kAvx512Attention;  // run only where cpu_features().avx512
extern const AttentionLoops kAmxAttention;     // run only where may_use_amx_bf16()

struct ProductCall;
struct ProductPart;

/// See kernels/product.h.
struct ProductLoops {
  std::size_t (*bytes)(const ProductCall& call, const ProductPart& part);
  void (*multiply)(const ProductCall& call, const ProductPart& part, void* scratch);
};

extern const ProductLoops kAmxProduct;  // run only where may_use_amx_bf16()

struct KernelTable {
  const char* isa;                     // as HALFSTEP_ISA spells it
  FormatKernels format[kFormatCount];  // in the order of enum Format; FP32 and E8M0 have none
  RandomKernel random;                 // the words that stochastic casts use
  const UpdateStages* update;
  const NormRows* norm;
  const PointwiseLoops* pointwise;
  const QuantiseRows* quantise;
  const StatisticsPass* statistics;
  const AttentionLoops* attention;
  const ProductLoops* product = nullptr;  // of BF16; null where LibTorch's are as good
};

extern const KernelTable kScalarKernels;
extern const KernelTable kAvx2Kernels;    // run only where cpu_features().avx2
extern const KernelTable kAvx512Kernels;  // run only where cpu_features().avx512
extern const KernelTable
    kAmxKernels;  // AVX-512's, but for attention and products; run only where may_use_amx_bf16()

}  // namespace halfstep
