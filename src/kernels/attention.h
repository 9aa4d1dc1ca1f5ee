// Attention: softmax(query key^T scale + mask) value, for each of many heads, and its gradients.
//
//   AttentionCall call = {...};                               // where everything lies
//   attention_forward(call, batch, head, 0, call.queries);    // writes output, tops and log_sums
//   attention_backward(call, unit);                           // for every unit < attention_units(call),
//   then, sum_query_grads(call, batch, head);                       // where attention_parts(call) > 1
//
// No matrix of probabilities is kept: backward computes it again, tile by tile, from each row's largest logit
// and the logarithm of its sum. In one number the second would be lost beside a large first. Sums are FP32 in
// an order that depends on the sizes alone, so that who computes which unit, and on how many threads, does
// not change a bit.
#pragma once

#include <cstddef>

#include "kernels/dispatch.h"

namespace halfstep {

/// 16-bit codes of [batch, heads, rows, head size]. The elements of a row lie one behind the other; the
/// distances of the rest are counted in elements.
struct HeadRows {
  const std::uint16_t* codes = nullptr;
  std::ptrdiff_t batch = 0, head = 0, row = 0;
};
struct WritableHeadRows {
  std::uint16_t* codes = nullptr;
  std::ptrdiff_t batch = 0, head = 0, row = 0;
};

enum class MaskType : std::uint8_t { None, Bool, BF16, FP16, FP32 };

/// Added to the scaled products; a Bool is false where a key does not count. Distances in elements, 0 where
/// one value stands for all.
struct AttentionMask {
  MaskType type = MaskType::None;
  const void* values = nullptr;
  std::ptrdiff_t batch = 0, head = 0, query = 0, key = 0;
};

/// A probability is dropped where its random word, of element ((batch * heads + head) * queries + query) *
/// keys + key of the stream, is below `threshold`, and multiplied by `factor` where it stays.
struct AttentionDropout {
  std::uint32_t threshold = 0;  // 0: nothing is dropped
  float factor = 1;
  StochasticKey key;
};

struct AttentionCall {
  Format format;  // of all rows: BF16 or FP16
  std::size_t batch, heads, key_heads, queries, keys, head_size;
  float scale;
  bool causal = false;  // query i sees keys 0 to i
  AttentionMask mask;
  AttentionDropout dropout;

  HeadRows query, key,
      value;  // key and value have key_heads heads, each for heads / key_heads of the queries
  // Written by forward, read by backward of the same table, which has a base of its own for logarithms.
  WritableHeadRows output;
  float* tops = nullptr;      // [batch, heads, queries]: the largest logit; 0 for a row that sees no key
  float* log_sums = nullptr;  // the same sizes: of the probabilities over the largest; +Inf for such a row

  HeadRows output_grad;
  WritableHeadRows query_grad, key_grad, value_grad;
  /// [parts, batch, heads, queries, padded_head_size]; null where attention_parts is 1.
  float* query_grad_parts = nullptr;
};

/// The head size, rounded up to whole vectors: FP32 rows are padded with zeros.
std::size_t padded_head_size(const AttentionCall& call);

/// Of a (batch, key head) pair, into how many runs of keys backward's work is divided: several where there
/// are few pairs.
std::size_t attention_parts(const AttentionCall& call);
std::size_t attention_units(const AttentionCall& call);

/// Memory that a thread needs, aligned to 64 bytes; one piece serves any number of calls one after the other.
std::size_t attention_forward_bytes(const AttentionCall& call, const KernelTable& table = kernels());
std::size_t attention_backward_bytes(const AttentionCall& call, const KernelTable& table = kernels());

/// Queries [first, first + count) of one head. `first` is a multiple of kAttentionQueries.
inline constexpr std::size_t kAttentionQueries = 64;
void attention_forward(const AttentionCall& call, std::size_t batch, std::size_t head, std::size_t first,
                       std::size_t count, void* scratch, const KernelTable& table = kernels());

/// The gradients of a run of keys and values, and what they add to that of the queries: which is written
/// where attention_parts is 1.
void attention_backward(const AttentionCall& call, std::size_t unit, void* scratch,
                        const KernelTable& table = kernels());

/// Adds what the parts found for the queries of one head, and writes it.
void sum_query_grads(const AttentionCall& call, std::size_t batch, std::size_t head,
                     const KernelTable& table = kernels());

/// What the probabilities of one query, counted over batches and heads, are multiplied by: 0 where one is
/// dropped. `factors` has room for call.keys.
void attention_dropout_factors(const AttentionCall& call, std::size_t query, float* factors,
                               const KernelTable& table = kernels());

}  // namespace halfstep
