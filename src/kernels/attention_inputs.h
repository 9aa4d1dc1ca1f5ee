// What every ISA's attention reads besides its rows. All is local to the file that includes it, see
// avx512.cpp for why.
#pragma once

#include "kernels/attention.h"

namespace halfstep {
namespace {

/// Queries and keys of one tile of probabilities. On the diagonal of a causal call work is skipped in strips.
constexpr std::size_t kTileQueries = kAttentionQueries, kTileKeys = 64, kStrip = 16;

constexpr float kLog2E = 0x1.715476p+0F;
constexpr float kInf = __builtin_inff(), kLargest = __FLT_MAX__;

[[maybe_unused]] constexpr std::size_t up_to_multiple(std::size_t count, std::size_t of) {
  return (count + of - 1) / of * of;
}

[[maybe_unused]] constexpr std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

template <typename Rows>
auto* row_at(const Rows& rows, const HeadOf& of, std::size_t row) {
  return rows.codes + static_cast<std::ptrdiff_t>(of.batch) * rows.batch +
         static_cast<std::ptrdiff_t>(of.head) * rows.head + static_cast<std::ptrdiff_t>(row) * rows.row;
}

[[maybe_unused]] HeadRows readable(const WritableHeadRows& rows) {
  return {rows.codes, rows.batch, rows.head, rows.row};
}

/// The mask's value, in FP32.
[[maybe_unused]] float mask_value(const AttentionMask& mask, std::ptrdiff_t place) {
  float value = 0;
  switch (mask.type) {
    case MaskType::None:
      break;
    case MaskType::Bool:
      value = static_cast<const bool*>(mask.values)[place] ? 0 : -__builtin_inff();
      break;
    case MaskType::BF16:
      value = __builtin_bit_cast(float,
                                 std::uint32_t{static_cast<const std::uint16_t*>(mask.values)[place]} << 16);
      break;
    case MaskType::FP16:
      kScalarKernels.format[static_cast<int>(Format::FP16)].decode(
          static_cast<const std::uint16_t*>(mask.values) + place, &value, 1);
      break;
    case MaskType::FP32:
      value = static_cast<const float*>(mask.values)[place];
      break;
  }
  return value;
}

[[maybe_unused]] std::ptrdiff_t mask_place(const AttentionMask& mask, const HeadOf& of, std::size_t query) {
  return static_cast<std::ptrdiff_t>(of.batch) * mask.batch +
         static_cast<std::ptrdiff_t>(of.head) * mask.head + static_cast<std::ptrdiff_t>(query) * mask.query;
}

/// The query's number over batches and heads: that of its row of log_sums and of dropout.
[[maybe_unused]] std::size_t row_number(const AttentionCall& call, const HeadOf& of, std::size_t query) {
  return (of.batch * call.heads + of.head) * call.queries + query;
}

/// factors[i] of the probabilities of keys first + i for the query of this number: 0 where one is dropped.
[[maybe_unused]] void dropout_factors(const AttentionCall& call, RandomKernel random, std::uint64_t row,
                                      std::size_t first, std::size_t count, float* factors) {
  std::uint32_t words[kTileKeys];
  for (std::size_t done = 0; done < count; done += kTileKeys) {
    const std::size_t now = smaller(kTileKeys, count - done);
    random({.key = call.dropout.key, .first_element = row * call.keys + first + done}, words, now);
    for (std::size_t i = 0; i < now; ++i)
      factors[done + i] = words[i] < call.dropout.threshold ? 0 : call.dropout.factor;
  }
}

/// Takes memory piece by piece, each aligned to 64 bytes. Counts only, where it has none.
struct Pieces {
  char* memory;
  std::size_t taken = 0;
  template <typename Number>
  Number* take(std::size_t count) {
    Number* const piece = memory == nullptr ? nullptr : reinterpret_cast<Number*>(memory + taken);
    taken += up_to_multiple(count * sizeof(Number), 64);
    return piece;
  }
};

/// Some queries of one head by some keys.
struct Block {
  HeadOf of;
  std::size_t first_query, queries, first_key, keys;
};

/// Times log2(e). What is finite stays so: models fill masks with the least number of a type.
[[maybe_unused]] float of_base_2(float mask) {
  const float scaled = mask * kLog2E;
  if (mask == -kInf || mask == kInf) return mask;
  return scaled < -kLargest ? -kLargest : scaled > kLargest ? kLargest : scaled;
}

/// mask[key * row + query], added to logits of base 2.
[[maybe_unused]] void load_mask(const AttentionCall& call, const Block& block, float* mask, std::size_t row) {
  for (std::size_t query = 0; query < block.queries; ++query) {
    const std::ptrdiff_t first = mask_place(call.mask, block.of, block.first_query + query) +
                                 static_cast<std::ptrdiff_t>(block.first_key) * call.mask.key;
    for (std::size_t key = 0; key < block.keys; ++key)
      mask[key * row + query] =
          of_base_2(mask_value(call.mask, first + static_cast<std::ptrdiff_t>(key) * call.mask.key));
  }
  for (std::size_t key = 0; key < block.keys; ++key)
    for (std::size_t query = block.queries; query < row; ++query) mask[key * row + query] = 0;
}

/// factors[key * row + query] of dropout; the block has at most kTileKeys keys.
[[maybe_unused]] void load_factors(const AttentionCall& call, RandomKernel random, const Block& block,
                                   float* factors, std::size_t row) {
  float of_query[kTileKeys] = {};
  for (std::size_t query = 0; query < row; ++query) {
    if (query < block.queries)
      dropout_factors(call, random, row_number(call, block.of, block.first_query + query), block.first_key,
                      block.keys, of_query);
    for (std::size_t key = 0; key < block.keys; ++key) factors[key * row + query] = of_query[key];
  }
}

}  // namespace
}  // namespace halfstep
