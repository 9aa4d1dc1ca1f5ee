// Attention of BF16 with AMX's tiles, and AVX-512 for what lies between the products; FP16 goes to AVX-512.
//
// As in attention_blocks.h, probabilities lie with their queries side by side. The sums of all products are
// FP32; probabilities and the gradients of logits are rounded to BF16 to be multiplied, as in LibTorch.
//
// A product takes rows of numbers (keys, or the transpose of what it sums over) times pairs: `right` has two
// neighbours of the sum in one word. Everything is padded with zeros to whole tiles.
#include "kernels/amx_tiles.h"
#include "kernels/attention_inputs.h"
#include "kernels/attention_vectors_avx512.h"
#include "kernels/tile_operands_avx512.h"

namespace halfstep {
namespace {

using Floats = Avx512::Floats;

/// A block is two tiles by two: probabilities of kBlock keys and kBlock queries.
constexpr std::size_t kTileRows = 16, kBlock = 32;
/// Blocks between two products of a run, so that sums stay in tiles for long.
constexpr std::size_t kBackwardKeys = 4, kBackwardQueries = 8, kForwardKeys = 16;

std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }

/// The head size as a product sums over it, and as it has it in its result.
std::size_t summed_size(const AttentionCall& call) { return up_to_multiple(call.head_size, kBlock); }
std::size_t result_size(const AttentionCall& call) { return up_to_multiple(call.head_size, kStrip); }

// ---- Products ----

/// Where tiles of an operand lie: `next` is the tile beside the first (further rows of a left operand,
/// further columns of a right one), `step` the distance to the next 32 of the sum, both in codes.
struct Operand {
  const Code* codes;
  std::size_t next, step, row_bytes;
};

template <bool two_rows, bool two_columns>
void add_product(const Operand& left, const Operand& right, std::size_t steps, float* sums,
                 std::size_t sums_row, bool adds) {
  const std::size_t bytes = sums_row * sizeof(float);
  float* const below = sums + kTileRows * sums_row;
  if (adds) {
    Tiles::load<0>(sums, bytes);
    if constexpr (two_columns) Tiles::load<1>(sums + kTileRows, bytes);
    if constexpr (two_rows) Tiles::load<2>(below, bytes);
    if constexpr (two_rows && two_columns) Tiles::load<3>(below + kTileRows, bytes);
  } else {
    Tiles::zero<0>();
    if constexpr (two_columns) Tiles::zero<1>();
    if constexpr (two_rows) Tiles::zero<2>();
    if constexpr (two_rows && two_columns) Tiles::zero<3>();
  }
  const Code *a = left.codes, *b = right.codes;
  for (std::size_t step = 0; step < steps; ++step, a += left.step, b += right.step) {
    Tiles::load<4>(a, left.row_bytes);
    Tiles::load<6>(b, right.row_bytes);
    Tiles::multiply<0, 4, 6>();
    if constexpr (two_columns) {
      Tiles::load<7>(b + right.next, right.row_bytes);
      Tiles::multiply<1, 4, 7>();
    }
    if constexpr (two_rows) {
      Tiles::load<5>(a + left.next, left.row_bytes);
      Tiles::multiply<2, 5, 6>();
      if constexpr (two_columns) Tiles::multiply<3, 5, 7>();
    }
  }
  Tiles::store<0>(sums, bytes);
  if constexpr (two_columns) Tiles::store<1>(sums + kTileRows, bytes);
  if constexpr (two_rows) Tiles::store<2>(below, bytes);
  if constexpr (two_rows && two_columns) Tiles::store<3>(below + kTileRows, bytes);
}

/// sums[32 keys][size] += left (32 keys by 32 * steps queries) * right (pairs of queries by `size`).
void add_to_keys(const Operand& left, const Code* right, std::size_t steps, std::size_t size, float* sums) {
  Operand b{.codes = right, .next = 32, .step = kTileRows * size * 2, .row_bytes = size * 4};
  std::size_t column = 0;
  for (; column + 32 <= size; column += 32, b.codes += 64)
    add_product<true, true>(left, b, steps, sums + column, size, true);
  if (column < size) add_product<true, false>(left, b, steps, sums + column, size, true);
}

/// sums[size][32 queries] += left (`size` rows of tiles, 32 keys each) * right (pairs of keys by 32 queries).
void add_to_queries(Operand left, const Operand& right, std::size_t steps, std::size_t size, float* sums) {
  std::size_t row = 0;
  for (; row + 32 <= size; row += 32, left.codes += 2 * left.next)
    add_product<true, true>(left, right, steps, sums + row * kBlock, kBlock, true);
  if (row < size) add_product<false, true>(left, right, steps, sums + row * kBlock, kBlock, true);
}

// ---- Rows on their way into tiles ----

Source source_of(const AttentionCall& call, const HeadRows& rows, const HeadOf& of, std::size_t first,
                 std::size_t count) {
  return {.codes = row_at(rows, of, first), .row = rows.row, .size = call.head_size, .count = count};
}

/// to[row][column]: a left operand that is summed over columns.
void pack_rows(const Source& from, std::size_t size, Code* to) {
  for (std::size_t first = 0; first < from.count; first += kBlock)
    for (std::size_t column = 0; column < size; column += 32)
      from.of_block(first, column, [&](auto load) {
        for (std::size_t i = 0; i < kBlock; ++i)
          _mm512_store_si512(to + (first + i) * size + column, load(i));
      });
}

/// For each block of 32 rows to[column / 2][row], in words: a right operand that is summed over columns.
void pack_across(const Source& from, std::size_t size, Code* to) {
  for (std::size_t first = 0; first < from.count; first += kBlock, to += size * kBlock)
    for (std::size_t column = 0; column < size; column += 32)
      from.of_block(first, column, [&](auto load) {
        for (std::size_t half = 0; half < 2; ++half) {
          __m512i rows[16];
          for (std::size_t i = 0; i < 16; ++i) rows[i] = load(half * 16 + i);
          Avx512::transpose(rows);
          for (std::size_t i = 0; i < 16; ++i)
            _mm512_store_si512(to + (column / 2 + i) * 64 + half * 32, rows[i]);
        }
      });
}

/// to[row / 2][column], in words: a right operand that is summed over rows.
void pack_pairs(const Source& from, std::size_t size, Code* to) {
  for (std::size_t first = 0; first < from.count; first += kBlock)
    for (std::size_t column = 0; column < size; column += 32)
      from.of_block(first, column, [&](auto load) {
        for (std::size_t i = 0; i < kBlock; i += 2) {
          const __m512i even = load(i), odd = load(i + 1);
          Code* const place = to + (first + i) * size + column * 2;
          _mm512_storeu_si512(place, low_pairs(even, odd));
          if (column + 16 < size) _mm512_storeu_si512(place + 32, high_pairs(even, odd));
        }
      });
}

/// Tiles of 16 columns by 32 rows, those of the same columns one behind the other: a left operand that is
/// summed over rows.
void pack_transposed(const Source& from, std::size_t size, Code* to) {
  const std::size_t blocks = blocks_of(from.count);
  for (std::size_t block = 0; block < blocks; ++block)
    for (std::size_t column = 0; column < size; column += 32)
      from.of_block(block * kBlock, column, [&](auto load) {
        __m512i low[16], high[16];
        turn_block(load, low, high);
        Code* const place = to + (column / 16 * blocks + block) * 512;
        for (std::size_t i = 0; i < 16; ++i) _mm512_store_si512(place + i * 32, low[i]);
        if (column + 16 >= size) return;
        for (std::size_t i = 0; i < 16; ++i) _mm512_store_si512(place + blocks * 512 + i * 32, high[i]);
      });
}

void clear(float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; i += 16) _mm512_store_ps(values + i, Floats{});
}

/// Calls body(query, column, 16 elements of that query's row) for sums[size][32 queries], of which `count`
/// are wanted, each multiplied by the factor of its query.
template <typename Body>
void turn_sums(const float* sums, std::size_t size, std::size_t count, const float* factors, Body body) {
  for (std::size_t half = 0; half < kBlock && half < count; half += 16)
    for (std::size_t column = 0; column < size; column += 16) {
      __m512i rows[16];
      for (std::size_t i = 0; i < 16; ++i)
        rows[i] = _mm512_castps_si512(Floats(_mm512_load_ps(sums + (column + i) * kBlock + half)) *
                                      Floats(_mm512_load_ps(factors + half)));
      Avx512::transpose(rows);
      for (std::size_t i = 0; i < smaller(16, count - half); ++i)
        body(half + i, column, _mm512_castsi512_ps(rows[i]));
    }
}

void store_row_part(const AttentionCall& call, const WritableHeadRows& rows, const HeadOf& of,
                    std::size_t row, std::size_t column, Floats values) {
  Avx512::store_codes(Format::BF16, row_at(rows, of, row) + column, values,
                      smaller(16, call.head_size - column));
}

/// What lies beside a block of probabilities.
struct Beside {
  const float* mask = nullptr;
  const float* factors = nullptr;
};

Beside load_beside(const AttentionCall& call, RandomKernel random, const Block& block, float* mask,
                   float* factors) {
  Beside found;
  if (call.mask.type != MaskType::None) {
    load_mask(call, block, mask, kBlock);
    found.mask = mask;
  }
  if (call.dropout.threshold > 0) {
    load_factors(call, random, block, factors, kBlock);
    found.factors = factors;
  }
  return found;
}

/// Lanes before the first query that sees this key get `hidden`.
Floats seen(bool causal, std::size_t key, std::size_t first_query, Floats lanes, float hidden) {
  if (!causal || key <= first_query) return lanes;
  return Avx512::from_lane(key - first_query, lanes, _mm512_set1_ps(hidden));
}

// ---- Forward ----

struct ForwardMemory {
  Code *keys, *values, *queries, *p;
  float *logits, *mask, *factors, *output;
  std::size_t bytes;
  ForwardMemory(const AttentionCall& call, void* memory) {
    const std::size_t keys_up = blocks_of(call.keys) * kBlock, most = smaller(kForwardKeys * kBlock, keys_up);
    Pieces pieces{static_cast<char*>(memory)};
    keys = pieces.take<Code>(keys_up * summed_size(call));
    values = pieces.take<Code>(keys_up * result_size(call));
    queries = pieces.take<Code>(kBlock * summed_size(call));
    p = pieces.take<Code>(most * kBlock);
    logits = pieces.take<float>(most * kBlock);
    mask = pieces.take<float>(kBlock * kBlock);
    factors = pieces.take<float>(kBlock * kBlock);
    output = pieces.take<float>(result_size(call) * kBlock);
    bytes = pieces.taken;
  }
};

std::size_t forward_bytes(const AttentionCall& call) {
  return call.format == Format::BF16 ? ForwardMemory(call, nullptr).bytes
                                     : kAvx512Attention.forward_bytes(call);
}

/// What the queries of a block have so far: the largest logit, in base 2, and the sum.
struct Softened {
  Floats top[2], sum[2];
};

/// The logits of a block as base 2's, in place, and their largest.
void scale_logits(const AttentionCall& call, const Block& block, const Beside& beside, float* logits,
                  Floats (&top)[2]) {
  const Floats log_scale = _mm512_set1_ps(call.scale * kLog2E);
  for (std::size_t row = 0; row < block.keys; ++row)
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t place = row * kBlock + half * 16;
      Floats logit = Floats(_mm512_load_ps(logits + place)) * log_scale;
      if (beside.mask) logit = logit + Floats(_mm512_load_ps(beside.mask + place));
      logit = seen(call.causal, block.first_key + row, block.first_query + half * 16, logit, -kInf);
      _mm512_store_ps(logits + place, logit);
      top[half] = Avx512::number_max(logit, top[half]);
    }
}

/// Probabilities but for a factor of each query, as pairs of keys.
void soften(const Block& block, const Beside& beside, const float* logits, const Floats (&used)[2],
            Floats (&sum)[2], Code* p) {
  for (std::size_t row = 0; row < kBlock; row += 2) {
    Floats values[2][2];
    for (std::size_t i = 0; i < 2; ++i)
      for (std::size_t half = 0; half < 2; ++half) {
        const std::size_t place = (row + i) * kBlock + half * 16;
        Floats value{};
        if (row + i < block.keys) {
          value = Avx512::exp2(Floats(_mm512_load_ps(logits + place)) - used[half]);
          sum[half] = sum[half] + value;
          if (beside.factors) value = value * Floats(_mm512_load_ps(beside.factors + place));
        }
        values[i][half] = value;
      }
    const __m512i even = Tiles::rounded(values[0][0], values[0][1]),
                  odd = Tiles::rounded(values[1][0], values[1][1]);
    _mm512_store_si512(p + row * kBlock, low_pairs(even, odd));
    _mm512_store_si512(p + row * kBlock + 32, high_pairs(even, odd));
  }
}

/// The output of at most 32 queries.
void forward_block(const AttentionCall& call, RandomKernel random, HeadOf of, std::size_t first,
                   std::size_t count, std::size_t keys, const ForwardMemory& memory) {
  const std::size_t size = summed_size(call), out_size = result_size(call), all_blocks = blocks_of(keys);
  pack_across(source_of(call, call.query, of, first, count), size, memory.queries);
  clear(memory.output, out_size * kBlock);
  const std::size_t end = call.causal ? smaller(keys, first + count) : keys, end_block = blocks_of(end);
  Softened so_far{};
  for (Floats& top : so_far.top) top = _mm512_set1_ps(-kInf);
  const Operand queries{.codes = memory.queries, .next = 32, .step = 1024, .row_bytes = 128};
  const auto block_at = [&](std::size_t block) {
    return Block{of, first, count, block * kBlock, smaller(kBlock, keys - block * kBlock)};
  };
  for (std::size_t begin = 0; begin < end_block; begin += kForwardKeys) {
    const std::size_t blocks = smaller(kForwardKeys, end_block - begin);
    Floats top[2] = {so_far.top[0], so_far.top[1]};
    for (std::size_t i = 0; i < blocks; ++i) {
      float* const logits = memory.logits + i * kBlock * kBlock;
      add_product<true, true>({memory.keys + (begin + i) * kBlock * size, kTileRows * size, 32, size * 2},
                              queries, size / 32, logits, kBlock, false);
      const Block block = block_at(begin + i);
      Beside beside;
      if (call.mask.type != MaskType::None) {
        load_mask(call, block, memory.mask, kBlock);
        beside.mask = memory.mask;
      }
      scale_logits(call, block, beside, logits, top);
    }
    Floats used[2], rescale[2], sum[2] = {};
    for (std::size_t half = 0; half < 2; ++half) {
      used[half] = Avx512::zero_where_minus_inf(top[half]);
      rescale[half] = Avx512::exp2(so_far.top[half] - used[half]);
    }
    for (std::size_t i = 0; i < blocks; ++i) {
      const Block block = block_at(begin + i);
      Beside beside;
      if (call.dropout.threshold > 0) {
        load_factors(call, random, block, memory.factors, kBlock);
        beside.factors = memory.factors;
      }
      soften(block, beside, memory.logits + i * kBlock * kBlock, used, sum, memory.p + i * kBlock * kBlock);
    }
    for (std::size_t half = 0; half < 2; ++half) {
      so_far.sum[half] = so_far.sum[half] * rescale[half] + sum[half];
      so_far.top[half] = top[half];
    }
    if (begin > 0) {
      for (std::size_t row = 0; row < out_size; ++row)
        for (std::size_t half = 0; half < 2; ++half) {
          float* const place = memory.output + row * kBlock + half * 16;
          _mm512_store_ps(place, Floats(_mm512_load_ps(place)) * rescale[half]);
        }
    }
    add_to_queries({memory.values + begin * 512, all_blocks * 512, 512, 64}, {memory.p, 32, 1024, 128},
                   blocks, out_size, memory.output);
  }
  alignas(64) float tops[kBlock], sums[kBlock], factors[kBlock];
  float* const of_rows = call.tops + row_number(call, of, first);
  float* const log_sums = call.log_sums + row_number(call, of, first);
  for (std::size_t half = 0; half < 2; ++half) {
    _mm512_store_ps(tops + half * 16, so_far.top[half]);
    _mm512_store_ps(sums + half * 16, so_far.sum[half]);
  }
  for (std::size_t i = 0; i < kBlock; ++i) {
    const bool sees_none = sums[i] == 0;
    factors[i] = sees_none ? 0 : 1 / sums[i];
    if (i >= count) continue;
    of_rows[i] = sees_none ? 0 : tops[i];
    log_sums[i] = sees_none ? kInf : __builtin_log2f(sums[i]);
  }
  turn_sums(memory.output, out_size, count, factors,
            [&](std::size_t query, std::size_t column, Floats values) {
              store_row_part(call, call.output, of, first + query, column, values);
            });
}

void forward(const AttentionCall& call, RandomKernel random, HeadOf of, std::size_t first_query,
             std::size_t count, void* scratch) {
  if (call.format != Format::BF16)
    return kAvx512Attention.forward(call, random, of, first_query, count, scratch);
  const ForwardMemory memory(call, scratch);
  const std::size_t end = first_query + count;
  const std::size_t keys = call.causal ? smaller(call.keys, end) : call.keys;
  const HeadOf key_head{of.batch, of.head / (call.heads / call.key_heads)};
  pack_rows(source_of(call, call.key, key_head, 0, keys), summed_size(call), memory.keys);
  pack_transposed(source_of(call, call.value, key_head, 0, keys), result_size(call), memory.values);
  Tiles::configure();
  for (std::size_t first = first_query; first < end; first += kBlock)
    forward_block(call, random, of, first, smaller(kBlock, end - first), keys, memory);
  Tiles::release();
}

// ---- Backward ----

struct BackwardMemory {
  // Of the run of keys.
  Code *keys, *values, *keys_transposed;
  float *key_sums, *value_sums;
  // Of all queries of a head.
  Code *queries_across, *grads_across, *query_pairs, *grad_pairs;
  float *tops, *log_sums, *along, *query_sums;
  // Of at most kBackwardKeys by kBackwardQueries blocks: as left operands, and as pairs of keys.
  Code *p, *of_logits, *of_logits_pairs;
  // Of a block.
  float *logits, *of_p, *mask, *factors;
  std::size_t bytes;

  BackwardMemory(const AttentionCall& call, std::size_t most_keys, void* memory) {
    const std::size_t size = summed_size(call), out_size = result_size(call);
    const std::size_t keys_up = blocks_of(most_keys) * kBlock, queries_up = blocks_of(call.queries) * kBlock;
    Pieces pieces{static_cast<char*>(memory)};
    for (float** each : {&logits, &of_p, &mask, &factors}) *each = pieces.take<float>(kBlock * kBlock);
    for (Code** each : {&p, &of_logits, &of_logits_pairs})
      *each = pieces.take<Code>(smaller(kBackwardKeys * kBlock, keys_up) * kBackwardQueries * kBlock);
    for (Code** each : {&keys, &values}) *each = pieces.take<Code>(keys_up * size);
    keys_transposed = pieces.take<Code>(keys_up * out_size);
    for (float** each : {&key_sums, &value_sums}) *each = pieces.take<float>(keys_up * out_size);
    for (Code** each : {&queries_across, &grads_across}) *each = pieces.take<Code>(queries_up * size);
    for (Code** each : {&query_pairs, &grad_pairs}) *each = pieces.take<Code>(queries_up * out_size);
    for (float** each : {&tops, &log_sums, &along}) *each = pieces.take<float>(queries_up);
    query_sums = pieces.take<float>(queries_up * out_size);
    bytes = pieces.taken;
  }
};

std::size_t backward_bytes(const AttentionCall& call, std::size_t most_keys) {
  return call.format == Format::BF16 ? BackwardMemory(call, most_keys, nullptr).bytes
                                     : kAvx512Attention.backward_bytes(call, most_keys);
}

float dot(const Source& a, const Source& b, std::size_t row) {
  Floats sum{};
  for (std::size_t column = 0; column < a.size; column += 16) {
    const std::size_t count = smaller(16, a.size - column);
    const auto load = [&](const Source& from) {
      return Avx512::load_codes(Format::BF16,
                                from.codes + static_cast<std::ptrdiff_t>(row) * from.row + column, count);
    };
    sum = Avx512::fma(load(a), load(b), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

void prepare_queries(const AttentionCall& call, HeadOf of, const BackwardMemory& memory) {
  const std::size_t size = summed_size(call), out_size = result_size(call);
  const Source queries = source_of(call, call.query, of, 0, call.queries),
               grads = source_of(call, call.output_grad, of, 0, call.queries),
               output = source_of(call, readable(call.output), of, 0, call.queries);
  pack_across(queries, size, memory.queries_across);
  pack_across(grads, size, memory.grads_across);
  pack_pairs(queries, out_size, memory.query_pairs);
  pack_pairs(grads, out_size, memory.grad_pairs);
  const float* const tops = call.tops + row_number(call, of, 0);
  const float* const log_sums = call.log_sums + row_number(call, of, 0);
  for (std::size_t i = 0; i < blocks_of(call.queries) * kBlock; ++i) {
    // Behind the last query there are none: every probability is 0.
    memory.tops[i] = i < call.queries ? tops[i] : 0;
    memory.log_sums[i] = i < call.queries ? log_sums[i] : kInf;
    memory.along[i] = i < call.queries ? dot(grads, output, i) : 0;
  }
}

/// A block's probabilities and gradients of logits from its products. Most blocks have nothing beside them:
/// without the questions backward takes 3 to 8 % less time.
template <bool has_beside>
void gradients_of_logits(const AttentionCall& call, const Block& block, const Beside& beside,
                         const BackwardMemory& memory, Code* p, Code* of_logits, Code* pairs) {
  const Floats log_scale = _mm512_set1_ps(call.scale * kLog2E);
  const bool on_diagonal = call.causal && block.first_key + kBlock > block.first_query + 1;
  Floats top[2], log_sum[2], along[2];
  for (std::size_t half = 0; half < 2; ++half) {
    const std::size_t query = block.first_query + half * 16;
    top[half] = _mm512_load_ps(memory.tops + query);
    log_sum[half] = _mm512_load_ps(memory.log_sums + query);
    along[half] = _mm512_load_ps(memory.along + query);
  }
  for (std::size_t row = 0; row < kBlock; row += 2) {
    __m512i rounded[2];
    for (std::size_t i = 0; i < 2; ++i) {
      Floats probability[2] = {}, of_logit[2] = {};
      for (std::size_t half = 0; half < 2 && row + i < block.keys; ++half) {
        const std::size_t place = (row + i) * kBlock + half * 16;
        // As forward has it, to the bit: the largest is then exactly `top`, whatever its size.
        Floats logit = Floats(_mm512_load_ps(memory.logits + place)) * log_scale;
        if (has_beside && beside.mask) logit = logit + Floats(_mm512_load_ps(beside.mask + place));
        const Floats value = Avx512::exp2(logit - top[half] - log_sum[half]);
        const Floats grad = _mm512_load_ps(memory.of_p + place);
        Floats factor = _mm512_set1_ps(1);
        if (has_beside && beside.factors) factor = _mm512_load_ps(beside.factors + place);
        const Floats gradient = value * (grad * factor - along[half]);
        const std::size_t key = block.first_key + row + i, query = block.first_query + half * 16;
        probability[half] = seen(on_diagonal, key, query, value * factor, 0);
        of_logit[half] = seen(on_diagonal, key, query, gradient, 0);
      }
      _mm512_store_si512(p + (row + i) * kBlock, Tiles::rounded(probability[0], probability[1]));
      rounded[i] = Tiles::rounded(of_logit[0], of_logit[1]);
      _mm512_store_si512(of_logits + (row + i) * kBlock, rounded[i]);
    }
    _mm512_store_si512(pairs + row * kBlock, low_pairs(rounded[0], rounded[1]));
    _mm512_store_si512(pairs + row * kBlock + 32, high_pairs(rounded[0], rounded[1]));
  }
}

/// Runs of blocks of keys and of queries, counted in blocks, and where the keys of the unit begin.
struct Run {
  HeadOf of;
  std::size_t first_key, keys;  // of the unit
  std::size_t key, keys_end, query, queries_end;
  bool causal;

  /// The first block of queries, of this run, that sees anything of a block of keys.
  std::size_t seen_from(std::size_t key_block) const {
    const std::size_t first = causal ? first_key / kBlock + key_block : 0;
    return first > query ? first : query;
  }
  std::size_t place(std::size_t key_block, std::size_t query_block) const {
    return ((key_block - key) * kBackwardQueries + (query_block - query)) * kBlock * kBlock;
  }
};

void backward_run(const AttentionCall& call, RandomKernel random, const Run& run,
                  const BackwardMemory& memory) {
  const std::size_t size = summed_size(call), out_size = result_size(call), of_block = kBlock * kBlock;
  for (std::size_t key = run.key; key < run.keys_end; ++key)
    for (std::size_t query = run.seen_from(key); query < run.queries_end; ++query) {
      const auto product = [&](const Code* rows, const Code* across, float* sums) {
        add_product<true, true>({rows + key * kBlock * size, kTileRows * size, 32, size * 2},
                                {across + query * kBlock * size, 32, 1024, 128}, size / 32, sums, kBlock,
                                false);
      };
      product(memory.keys, memory.queries_across, memory.logits);
      product(memory.values, memory.grads_across, memory.of_p);
      const Block block{run.of, query * kBlock, smaller(kBlock, call.queries - query * kBlock),
                        run.first_key + key * kBlock, smaller(kBlock, run.keys - key * kBlock)};
      const std::size_t place = run.place(key, query);
      const Beside beside = load_beside(call, random, block, memory.mask, memory.factors);
      const auto gradients =
          beside.mask || beside.factors ? gradients_of_logits<true> : gradients_of_logits<false>;
      gradients(call, block, beside, memory, memory.p + place, memory.of_logits + place,
                memory.of_logits_pairs + place);
    }
  for (std::size_t key = run.key; key < run.keys_end; ++key) {
    const std::size_t first = run.seen_from(key), at = key * kBlock * out_size;
    if (first >= run.queries_end) break;
    const std::size_t place = run.place(key, first), pairs = first * kBlock * out_size;
    const auto left = [&](const Code* codes) { return Operand{codes + place, 512, of_block, 64}; };
    const std::size_t steps = run.queries_end - first;
    add_to_keys(left(memory.p), memory.grad_pairs + pairs, steps, out_size, memory.value_sums + at);
    add_to_keys(left(memory.of_logits), memory.query_pairs + pairs, steps, out_size, memory.key_sums + at);
  }
  for (std::size_t query = run.query; query < run.queries_end; ++query) {
    std::size_t steps = 0;  // the blocks of keys that these queries see are the first ones
    while (run.key + steps < run.keys_end && run.seen_from(run.key + steps) <= query) ++steps;
    if (steps == 0) continue;
    add_to_queries({memory.keys_transposed + run.key * 512, blocks_of(run.keys) * 512, 512, 64},
                   {memory.of_logits_pairs + run.place(run.key, query), 32, kBackwardQueries * of_block, 128},
                   steps, out_size, memory.query_sums + query * kBlock * out_size);
  }
}

void store_query_sums(const AttentionCall& call, HeadOf of, const BackwardMemory& memory, float* query_sums) {
  const std::size_t out_size = result_size(call);
  alignas(64) float factors[kBlock];
  for (float& factor : factors) factor = query_sums ? 1 : call.scale;
  for (std::size_t first = 0; first < call.queries; first += kBlock)
    turn_sums(memory.query_sums + first * out_size, out_size, smaller(kBlock, call.queries - first), factors,
              [&](std::size_t query, std::size_t column, Floats values) {
                if (query_sums)
                  _mm512_storeu_ps(query_sums + (first + query) * out_size + column, values);
                else
                  store_row_part(call, call.query_grad, of, first + query, column, values);
              });
}

void store_key_sums(const AttentionCall& call, const float* sums, float factor, const WritableHeadRows& rows,
                    HeadOf key_head, std::size_t first_key, std::size_t count) {
  const std::size_t out_size = result_size(call);
  for (std::size_t row = 0; row < count; ++row)
    for (std::size_t column = 0; column < out_size; column += 16)
      store_row_part(call, rows, key_head, first_key + row, column,
                     Floats(_mm512_load_ps(sums + row * out_size + column)) * factor);
}

void backward(const AttentionCall& call, RandomKernel random, HeadOf key_head, std::size_t first_key,
              std::size_t count, float* query_sums, void* scratch) {
  if (call.format != Format::BF16)
    return kAvx512Attention.backward(call, random, key_head, first_key, count, query_sums, scratch);
  const BackwardMemory memory(call, count, scratch);
  const std::size_t out_size = result_size(call), group = call.heads / call.key_heads;
  const std::size_t key_blocks = blocks_of(count), query_blocks = blocks_of(call.queries);
  const Source keys = source_of(call, call.key, key_head, first_key, count),
               values = source_of(call, call.value, key_head, first_key, count);
  pack_rows(keys, summed_size(call), memory.keys);
  pack_rows(values, summed_size(call), memory.values);
  pack_transposed(keys, out_size, memory.keys_transposed);
  clear(memory.key_sums, key_blocks * kBlock * out_size);
  clear(memory.value_sums, key_blocks * kBlock * out_size);
  Tiles::configure();
  for (std::size_t member = 0; member < group; ++member) {
    const HeadOf of{key_head.batch, key_head.head * group + member};
    prepare_queries(call, of, memory);
    clear(memory.query_sums, query_blocks * kBlock * out_size);
    for (std::size_t key = 0; key < key_blocks; key += kBackwardKeys) {
      const std::size_t first =
          call.causal ? (first_key / kBlock + key) / kBackwardQueries * kBackwardQueries : 0;
      for (std::size_t query = first; query < query_blocks; query += kBackwardQueries)
        backward_run(call, random,
                     {of, first_key, count, key, smaller(key + kBackwardKeys, key_blocks), query,
                      smaller(query + kBackwardQueries, query_blocks), call.causal},
                     memory);
    }
    store_query_sums(call, of, memory, query_sums ? query_sums + member * call.queries * out_size : nullptr);
  }
  Tiles::release();
  store_key_sums(call, memory.key_sums, call.scale, call.key_grad, key_head, first_key, count);
  store_key_sums(call, memory.value_sums, 1, call.value_grad, key_head, first_key, count);
}

}  // namespace

constinit const AttentionLoops kAmxAttention = {.forward_bytes = forward_bytes,
                                                .forward = forward,
                                                .backward_bytes = backward_bytes,
                                                .backward = backward};

}  // namespace halfstep
