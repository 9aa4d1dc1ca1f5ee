// Attention in tiles of keys by queries, in FP32. Each ISA's file includes this once and supplies the
// vectors; all is local to that file, see avx512.cpp for why.
//
// A tile of probabilities lies with its queries side by side: what belongs to a query (its largest logit, its
// sum, what backward subtracts) is a lane. The five products of a tile are then of one kind, rows of numbers
// that are broadcast times rows of vectors, and nothing but queries and gradients of outputs needs a
// transposed copy.
#pragma once

#include "kernels/attention_inputs.h"

namespace halfstep {
namespace {

/// A tile, and what lies beside its probabilities.
struct Tile {
  HeadOf of;  // of the queries
  std::size_t first_query, queries, first_key, keys;
  // Causal: rows before `full` are seen by every query; those from there on lie on the diagonal, and a query
  // sees the rows up to its own.
  std::size_t full;

  Block block() const { return {of, first_query, queries, first_key, keys}; }
  std::size_t columns() const { return up_to_multiple(queries, kStrip); }
  /// The first query, within the tile and in whole strips, that sees a row of the strip that begins here.
  std::size_t first_column(std::size_t row) const { return row < full ? 0 : first_key + row - first_query; }
};

/// The tile of these queries whose keys begin here; it has none where no query sees them.
Tile tile_at(const AttentionCall& call, HeadOf of, std::size_t first_query, std::size_t queries,
             std::size_t first_key, std::size_t end_key) {
  const std::size_t end = call.causal ? smaller(end_key, first_query + queries) : end_key;
  const std::size_t keys = end > first_key ? smaller(kTileKeys, end - first_key) : 0;
  const std::size_t before = first_query > first_key ? first_query - first_key : 0;
  return {of, first_query, queries, first_key, keys, call.causal ? smaller(keys, before) : keys};
}

template <typename Isa>
struct Attention {
  using Floats = typename Isa::Floats;
  static constexpr std::size_t kWidth = sizeof(Floats) / sizeof(float);
  static constexpr std::size_t kTile = kTileKeys * kTileQueries;

  static Floats all(float value) { return value - Floats{}; }

  // ---- Products ----

  /// c[R rows x V vectors] (+)= sum over steps of a(row, step) * b(step, vectors).
  template <int R, int V>
  [[gnu::always_inline]] static void block(const float* a, std::size_t a_row, std::size_t a_step,
                                           const float* b, std::size_t b_step, float* c, std::size_t c_row,
                                           std::size_t steps, bool adds) {
    Floats sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] = adds ? Isa::load(c + r * c_row + v * kWidth) : Floats{};
    for (std::size_t step = 0; step < steps; ++step) {
      Floats right[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) right[v] = Isa::load(b + step * b_step + v * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Floats left = Isa::broadcast(a + r * a_row + step * a_step);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sums[r][v] = Isa::fma(left, right[v], sums[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) Isa::store(c + r * c_row + v * kWidth, sums[r][v]);
  }

  /// The same for any number of rows.
  template <int R, int V>
  [[gnu::always_inline]] static void all_rows(const float* a, std::size_t a_row, std::size_t a_step,
                                              const float* b, std::size_t b_step, float* c, std::size_t c_row,
                                              std::size_t rows, std::size_t steps, bool adds) {
    for (; rows >= R; rows -= R, a += R * a_row, c += R * c_row)
      block<R, V>(a, a_row, a_step, b, b_step, c, c_row, steps, adds);
    if constexpr (R > 1) {
      if (rows > 0) all_rows<R / 2, V>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, adds);
    }
  }

  /// The same for any number of vectors.
  [[gnu::always_inline]] static void product(const float* a, std::size_t a_row, std::size_t a_step,
                                             const float* b, std::size_t b_step, float* c, std::size_t c_row,
                                             std::size_t rows, std::size_t vectors, std::size_t steps,
                                             bool adds) {
    constexpr int kMost = Isa::kVectors;
    for (; vectors >= kMost; vectors -= kMost, b += kMost * kWidth, c += kMost * kWidth)
      all_rows<Isa::kRows, kMost>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, adds);
    if constexpr (kMost > 3) {
      if (vectors == 3) all_rows<Isa::kRows, 3>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, adds);
    }
    if constexpr (kMost > 2) {
      if (vectors == 2) all_rows<2 * Isa::kRows, 2>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, adds);
    }
    if (vectors == 1) all_rows<2 * Isa::kRows, 1>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, adds);
  }

  /// tile[key][query] = the product of a row of `keys` with each query. `queries` is transposed.
  [[gnu::noinline]] static void tile_of_rows(const Tile& tile, const float* keys, const float* queries,
                                             std::size_t head_size, std::size_t padded, float* into) {
    product(keys, padded, 1, queries, kTileQueries, into, kTileQueries, tile.full, tile.columns() / kWidth,
            head_size, false);
    for (std::size_t row = tile.full; row < tile.keys; row += kStrip) {
      const std::size_t column = tile.first_column(row);
      product(keys + row * padded, padded, 1, queries + column, kTileQueries,
              into + row * kTileQueries + column, kTileQueries, smaller(kStrip, tile.keys - row),
              (tile.columns() - column) / kWidth, head_size, false);
    }
  }

  /// Rows of keys += tile * rows of queries.
  [[gnu::noinline]] static void add_to_keys(const Tile& tile, const float* from, const float* queries,
                                            std::size_t padded, float* sums) {
    product(from, kTileQueries, 1, queries, padded, sums, padded, tile.full, padded / kWidth, tile.queries,
            true);
    for (std::size_t row = tile.full; row < tile.keys; row += kStrip) {
      const std::size_t column = tile.first_column(row);
      product(from + row * kTileQueries + column, kTileQueries, 1, queries + column * padded, padded,
              sums + row * padded, padded, smaller(kStrip, tile.keys - row), padded / kWidth,
              tile.queries - column, true);
    }
  }

  /// Rows of queries += tile^T * rows of keys.
  [[gnu::noinline]] static void add_to_queries(const Tile& tile, const float* from, const float* keys,
                                               std::size_t padded, float* sums) {
    if (tile.full == tile.keys) {
      product(from, 1, kTileQueries, keys, padded, sums, padded, tile.queries, padded / kWidth, tile.keys,
              true);
      return;
    }
    for (std::size_t query = 0; query < tile.queries; query += kStrip) {
      const std::size_t behind = tile.first_query + query + kStrip;  // the first key that no query here sees
      const std::size_t seen = behind > tile.first_key ? smaller(tile.keys, behind - tile.first_key) : 0;
      product(from + query, 1, kTileQueries, keys, padded, sums + query * padded, padded,
              smaller(kStrip, tile.queries - query), padded / kWidth, seen, true);
    }
  }

  // ---- Rows ----

  /// values[row][element], padded with zeros.
  static void load_rows(const AttentionCall& call, const HeadRows& rows, const HeadOf& of, std::size_t first,
                        std::size_t count, float* values) {
    const std::size_t size = call.head_size, padded = up_to_multiple(size, kStrip);
    for (std::size_t row = 0; row < count; ++row, values += padded) {
      const std::uint16_t* const codes = row_at(rows, of, first + row);
      for (std::size_t i = 0; i < padded; i += kWidth)
        Isa::store(values + i,
                   i < size ? Isa::load_codes(call.format, codes + i, smaller(kWidth, size - i)) : Floats{});
    }
  }

  /// across[element][row] for kTileQueries rows, of which those behind `count` are zeros.
  static void turn(const float* values, std::size_t count, std::size_t padded, float* across) {
    alignas(64) float none[kWidth] = {};
    for (std::size_t row = 0; row < kTileQueries; row += kWidth) {
      for (std::size_t i = 0; i < padded; i += kWidth) {
        const float* from[kWidth];
        for (std::size_t r = 0; r < kWidth; ++r)
          from[r] = row + r < count ? values + (row + r) * padded + i : none;
        Isa::transpose(from, across + i * kTileQueries + row, kTileQueries);
      }
    }
  }

  static void store_rows(const AttentionCall& call, const float* values, float factor,
                         const WritableHeadRows& rows, const HeadOf& of, std::size_t first,
                         std::size_t count) {
    const std::size_t size = call.head_size, padded = up_to_multiple(size, kStrip);
    for (std::size_t row = 0; row < count; ++row, values += padded) {
      std::uint16_t* const codes = row_at(rows, of, first + row);
      for (std::size_t i = 0; i < size; i += kWidth)
        Isa::store_codes(call.format, codes + i, Isa::load(values + i) * all(factor),
                         smaller(kWidth, size - i));
    }
  }

  static void clear(float* values, std::size_t count) {
    for (std::size_t i = 0; i < count; i += kWidth) Isa::store(values + i, Floats{});
  }

  // ---- Forward ----

  struct ForwardMemory {
    float *keys, *values, *queries, *across, *logits, *mask, *factors, *output;
    std::size_t bytes;
    ForwardMemory(const AttentionCall& call, void* memory) {
      const std::size_t padded = up_to_multiple(call.head_size, kStrip);
      Pieces pieces{static_cast<char*>(memory)};
      keys = pieces.take<float>(call.keys * padded);
      values = pieces.take<float>(call.keys * padded);
      queries = pieces.take<float>(kTileQueries * padded);
      across = pieces.take<float>(kTileQueries * padded);
      output = pieces.take<float>(kTileQueries * padded);
      logits = pieces.take<float>(kTile);
      mask = pieces.take<float>(call.mask.type == MaskType::None ? 0 : kTile);
      factors = pieces.take<float>(call.dropout.threshold > 0 ? kTile : 0);
      bytes = pieces.taken;
    }
  };

  static std::size_t forward_bytes(const AttentionCall& call) { return ForwardMemory(call, nullptr).bytes; }

  /// Logits of base 2 become probabilities, but for a factor of each query: `tops` is the largest logit so
  /// far, `sums` that of the numbers. Returns in `rescale` what came of the sums before is multiplied by.
  [[gnu::noinline]] static void soften(const Tile& tile, Floats log_scale, const float* mask, float* logits,
                                       float* tops, float* sums, float* rescale) {
    for (std::size_t column = 0; column < tile.columns(); column += kWidth) {
      const Floats before = Isa::load(tops + column);
      Floats top = before;
      std::size_t rows = tile.full;
      for (std::size_t row = 0; row < tile.keys; ++row) {
        if (row >= tile.full && tile.first_column(row) >= column + kWidth) break;
        rows = row + 1;
        float* const place = logits + row * kTileQueries + column;
        Floats logit = Isa::load(place) * log_scale;
        if (mask) logit = logit + Isa::load(mask + row * kTileQueries + column);
        if (row >= tile.full && tile.first_column(row) > column)
          logit = Isa::from_lane(tile.first_column(row) - column, logit, all(-kInf));
        Isa::store(place, logit);
        top = Isa::number_max(logit, top);
      }
      const Floats used = Isa::zero_where_minus_inf(top);
      Floats sum{};
      for (std::size_t row = 0; row < rows; ++row) {
        float* const place = logits + row * kTileQueries + column;
        const Floats p = Isa::exp2(Isa::load(place) - used);
        sum = sum + p;
        Isa::store(place, p);
      }
      for (std::size_t row = rows; row < tile.keys; ++row)
        Isa::store(logits + row * kTileQueries + column, Floats{});
      const Floats factor = Isa::exp2(before - used);
      Isa::store(rescale + column, factor);
      Isa::store(sums + column, Isa::load(sums + column) * factor + sum);
      Isa::store(tops + column, top);
    }
  }

  static void forward(const AttentionCall& call, RandomKernel random, HeadOf of, std::size_t first_query,
                      std::size_t count, void* scratch) {
    const ForwardMemory memory(call, scratch);
    const std::size_t padded = up_to_multiple(call.head_size, kStrip), end = first_query + count;
    const std::size_t keys = call.causal ? smaller(call.keys, end) : call.keys;
    const HeadOf key_head{of.batch, of.head / (call.heads / call.key_heads)};
    load_rows(call, call.key, key_head, 0, keys, memory.keys);
    load_rows(call, call.value, key_head, 0, keys, memory.values);
    for (std::size_t first = first_query; first < end; first += kTileQueries)
      forward_queries(call, random, of, first, smaller(kTileQueries, end - first), keys, memory, padded);
  }

  static void forward_queries(const AttentionCall& call, RandomKernel random, HeadOf of, std::size_t first,
                              std::size_t count, std::size_t keys, const ForwardMemory& memory,
                              std::size_t padded) {
    const Floats log_scale = all(call.scale * kLog2E);
    alignas(64) float tops[kTileQueries], sums[kTileQueries], rescale[kTileQueries];
    for (std::size_t i = 0; i < kTileQueries; i += kWidth) {
      Isa::store(tops + i, all(-kInf));
      Isa::store(sums + i, Floats{});
    }
    load_rows(call, call.query, of, first, count, memory.queries);
    turn(memory.queries, count, padded, memory.across);
    clear(memory.output, count * padded);
    for (std::size_t key = 0; key < keys; key += kTileKeys) {
      const Tile tile = tile_at(call, of, first, count, key, keys);
      if (tile.keys == 0) break;
      tile_of_rows(tile, memory.keys + key * padded, memory.across, call.head_size, padded, memory.logits);
      const bool has_mask = call.mask.type != MaskType::None;
      if (has_mask) load_mask(call, tile.block(), memory.mask, kTileQueries);
      soften(tile, log_scale, has_mask ? memory.mask : nullptr, memory.logits, tops, sums, rescale);
      if (call.dropout.threshold > 0) {
        load_factors(call, random, tile.block(), memory.factors, kTileQueries);
        multiply(tile, memory.factors, memory.logits);
      }
      if (key > 0) {
        for (std::size_t query = 0; query < count; ++query)
          for (std::size_t i = 0; i < padded; i += kWidth) {
            float* const place = memory.output + query * padded + i;
            Isa::store(place, Isa::load(place) * all(rescale[query]));
          }
      }
      add_to_queries(tile, memory.logits, memory.values + key * padded, padded, memory.output);
    }
    float* const of_rows = call.tops + row_number(call, of, first);
    float* const log_sums = call.log_sums + row_number(call, of, first);
    for (std::size_t query = 0; query < count; ++query) {
      const bool sees_none = sums[query] == 0;
      store_rows(call, memory.output + query * padded, sees_none ? 0 : 1 / sums[query], call.output, of,
                 first + query, 1);
      of_rows[query] = sees_none ? 0 : tops[query];
      log_sums[query] = sees_none ? kInf : __builtin_log2f(sums[query]);
    }
  }

  [[gnu::noinline]] static void multiply(const Tile& tile, const float* factors, float* values) {
    for (std::size_t row = 0; row < tile.keys; ++row)
      for (std::size_t column = 0; column < tile.columns(); column += kWidth) {
        const std::size_t place = row * kTileQueries + column;
        Isa::store(values + place, Isa::load(values + place) * Isa::load(factors + place));
      }
  }

  // ---- Backward ----

  struct BackwardMemory {
    float *keys, *values, *key_sums, *value_sums;            // of the run of keys
    float *queries, *queries_across, *grads, *grads_across;  // of all queries of a head
    float *tops, *log_sums, *along, *query_sums;             // the same
    float *p, *of_p, *mask, *factors;                        // of a tile
    std::size_t bytes;
    BackwardMemory(const AttentionCall& call, std::size_t most_keys, void* memory) {
      const std::size_t padded = up_to_multiple(call.head_size, kStrip);
      const std::size_t queries_up = up_to_multiple(call.queries, kTileQueries);
      Pieces pieces{static_cast<char*>(memory)};
      p = pieces.take<float>(kTile);
      of_p = pieces.take<float>(kTile);
      mask = pieces.take<float>(call.mask.type == MaskType::None ? 0 : kTile);
      factors = pieces.take<float>(call.dropout.threshold > 0 ? kTile : 0);
      for (float** each : {&keys, &values, &key_sums, &value_sums})
        *each = pieces.take<float>(most_keys * padded);
      for (float** each : {&queries, &queries_across, &grads, &grads_across, &query_sums})
        *each = pieces.take<float>(queries_up * padded);
      tops = pieces.take<float>(queries_up);
      log_sums = pieces.take<float>(queries_up);
      along = pieces.take<float>(queries_up);
      bytes = pieces.taken;
    }
  };

  static std::size_t backward_bytes(const AttentionCall& call, std::size_t most_keys) {
    return BackwardMemory(call, most_keys, nullptr).bytes;
  }

  static void backward(const AttentionCall& call, RandomKernel random, HeadOf key_head, std::size_t first_key,
                       std::size_t count, float* query_sums, void* scratch) {
    const BackwardMemory memory(call, count, scratch);
    const std::size_t padded = up_to_multiple(call.head_size, kStrip);
    const std::size_t group = call.heads / call.key_heads, of_head = call.queries * padded;
    load_rows(call, call.key, key_head, first_key, count, memory.keys);
    load_rows(call, call.value, key_head, first_key, count, memory.values);
    clear(memory.key_sums, count * padded);
    clear(memory.value_sums, count * padded);
    for (std::size_t member = 0; member < group; ++member) {
      const HeadOf of{key_head.batch, key_head.head * group + member};
      prepare_queries(call, of, memory, padded);
      float* const sums = query_sums ? query_sums + member * of_head : memory.query_sums;
      clear(sums, of_head);
      for (std::size_t key = 0; key < count; key += kTileKeys) {
        const std::size_t first = call.causal ? (first_key + key) / kTileQueries * kTileQueries : 0;
        for (std::size_t query = first; query < call.queries; query += kTileQueries) {
          const Tile tile = tile_at(call, of, query, smaller(kTileQueries, call.queries - query),
                                    first_key + key, first_key + count);
          backward_tile(call, random, tile, key, memory, sums, padded);
        }
      }
      if (!query_sums) store_rows(call, sums, call.scale, call.query_grad, of, 0, call.queries);
    }
    store_rows(call, memory.key_sums, call.scale, call.key_grad, key_head, first_key, count);
    store_rows(call, memory.value_sums, 1, call.value_grad, key_head, first_key, count);
  }

  static void prepare_queries(const AttentionCall& call, HeadOf of, const BackwardMemory& memory,
                              std::size_t padded) {
    const float* const tops = call.tops + row_number(call, of, 0);
    const float* const log_sums = call.log_sums + row_number(call, of, 0);
    for (std::size_t first = 0; first < call.queries; first += kTileQueries) {
      const std::size_t count = smaller(kTileQueries, call.queries - first), at = first * padded;
      // The output in the place of a tile that is not yet needed.
      float* const output = memory.queries_across + at;
      load_rows(call, readable(call.output), of, first, count, output);
      load_rows(call, call.output_grad, of, first, count, memory.grads + at);
      for (std::size_t i = 0; i < kTileQueries; ++i) {
        // Behind the last query there are none: every probability is 0.
        memory.tops[first + i] = i < count ? tops[first + i] : 0;
        memory.log_sums[first + i] = i < count ? log_sums[first + i] : kInf;
        memory.along[first + i] =
            i < count ? dot(output + i * padded, memory.grads + at + i * padded, padded) : 0;
      }
      load_rows(call, call.query, of, first, count, memory.queries + at);
      turn(memory.queries + at, count, padded, memory.queries_across + at);
      turn(memory.grads + at, count, padded, memory.grads_across + at);
    }
  }

  static float dot(const float* a, const float* b, std::size_t count) {
    Floats sum{};
    for (std::size_t i = 0; i < count; i += kWidth) sum = Isa::fma(Isa::load(a + i), Isa::load(b + i), sum);
    float total = 0;
    for (std::size_t lane = 0; lane < kWidth; ++lane) total += sum[lane];
    return total;
  }

  static void backward_tile(const AttentionCall& call, RandomKernel random, const Tile& tile, std::size_t key,
                            const BackwardMemory& memory, float* query_sums, std::size_t padded) {
    const std::size_t of_keys = key * padded, of_queries = tile.first_query * padded;
    tile_of_rows(tile, memory.keys + of_keys, memory.queries_across + of_queries, call.head_size, padded,
                 memory.p);
    tile_of_rows(tile, memory.values + of_keys, memory.grads_across + of_queries, call.head_size, padded,
                 memory.of_p);
    const bool has_mask = call.mask.type != MaskType::None, drops = call.dropout.threshold > 0;
    if (has_mask) load_mask(call, tile.block(), memory.mask, kTileQueries);
    if (drops) load_factors(call, random, tile.block(), memory.factors, kTileQueries);
    gradients_of_logits(tile, all(call.scale * kLog2E), has_mask ? memory.mask : nullptr,
                        drops ? memory.factors : nullptr, memory.tops + tile.first_query,
                        memory.log_sums + tile.first_query, memory.along + tile.first_query, memory.p,
                        memory.of_p);
    add_to_keys(tile, memory.p, memory.grads + of_queries, padded, memory.value_sums + of_keys);
    add_to_keys(tile, memory.of_p, memory.queries + of_queries, padded, memory.key_sums + of_keys);
    add_to_queries(tile, memory.of_p, memory.keys + of_keys, padded, query_sums + of_queries);
  }

  /// Logits become probabilities, after dropout; gradients of probabilities become those of logits.
  [[gnu::noinline]] static void gradients_of_logits(const Tile& tile, Floats log_scale, const float* mask,
                                                    const float* factors, const float* tops,
                                                    const float* log_sums, const float* along, float* p,
                                                    float* of_p) {
    for (std::size_t row = 0; row < tile.keys; ++row) {
      const std::size_t seen_from = tile.first_column(row);
      for (std::size_t column = seen_from / kStrip * kStrip; column < tile.columns(); column += kWidth) {
        const std::size_t place = row * kTileQueries + column;
        // As forward has it, to the bit: the largest is then exactly `tops`, whatever its size.
        Floats logit = Isa::load(p + place) * log_scale;
        if (mask) logit = logit + Isa::load(mask + place);
        logit = logit - Isa::load(tops + column) - Isa::load(log_sums + column);
        Floats probability = Isa::exp2(logit), grad = Isa::load(of_p + place);
        if (factors) grad = grad * Isa::load(factors + place);
        Floats of_logit = probability * (grad - Isa::load(along + column));
        if (factors) probability = probability * Isa::load(factors + place);
        if (seen_from > column) {
          probability = Isa::from_lane(seen_from - column, probability, Floats{});
          of_logit = Isa::from_lane(seen_from - column, of_logit, Floats{});
        }
        Isa::store(p + place, probability);
        Isa::store(of_p + place, of_logit);
      }
    }
  }

  static constexpr AttentionLoops kLoops = {.forward_bytes = forward_bytes,
                                            .forward = forward,
                                            .backward_bytes = backward_bytes,
                                            .backward = backward};
};

}  // namespace
}  // namespace halfstep
