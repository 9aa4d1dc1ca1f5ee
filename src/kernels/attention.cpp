#include "kernels/attention.h"

#include <halfstep/error.h>

#include <algorithm>
#include <vector>

#include "kernels/attention_inputs.h"
#include "kernels/cast.h"

namespace halfstep {
namespace {

/// Fewer (batch, key head) pairs than this are divided, but not into runs shorter than kLeastKeys: each run
/// prepares all queries for itself.
constexpr std::size_t kFewPairs = 8, kLeastKeys = 256;

/// Keys of a part: whole tiles.
std::size_t keys_of_part(const AttentionCall& call) {
  const std::size_t pairs = call.batch * call.key_heads;
  const std::size_t parts =
      std::max<std::size_t>(1, std::min((kFewPairs + pairs - 1) / pairs, call.keys / kLeastKeys));
  return up_to_multiple((call.keys + parts - 1) / parts, kTileKeys);
}

void check(const AttentionCall& call) {
  HALFSTEP_CHECK(call.format == Format::BF16 || call.format == Format::FP16, "attention: rows are ",
                 traits(call.format).name, ", expected BF16 or FP16.");
  HALFSTEP_CHECK(call.key_heads > 0 && call.heads % call.key_heads == 0, "attention: ", call.heads,
                 " heads of queries do not share ", call.key_heads, " heads of keys evenly.");
}

}  // namespace

std::size_t padded_head_size(const AttentionCall& call) { return up_to_multiple(call.head_size, kStrip); }

std::size_t attention_parts(const AttentionCall& call) {
  const std::size_t each = keys_of_part(call);
  return (call.keys + each - 1) / each;
}

std::size_t attention_units(const AttentionCall& call) {
  return call.batch * call.key_heads * attention_parts(call);
}

std::size_t attention_forward_bytes(const AttentionCall& call, const KernelTable& table) {
  return table.attention->forward_bytes(call);
}

std::size_t attention_backward_bytes(const AttentionCall& call, const KernelTable& table) {
  return table.attention->backward_bytes(call, std::min(call.keys, keys_of_part(call)));
}

void attention_forward(const AttentionCall& call, std::size_t batch, std::size_t head, std::size_t first,
                       std::size_t count, void* scratch, const KernelTable& table) {
  check(call);
  table.attention->forward(call, table.random, {.batch = batch, .head = head}, first, count, scratch);
}

void attention_backward(const AttentionCall& call, std::size_t unit, void* scratch,
                        const KernelTable& table) {
  check(call);
  const std::size_t parts = attention_parts(call), each = keys_of_part(call);
  const std::size_t part = unit % parts, pair = unit / parts, first = part * each;
  const HeadOf key_head{.batch = pair / call.key_heads, .head = pair % call.key_heads};
  float* sums = nullptr;
  if (parts > 1) {
    const std::size_t of_head = call.queries * padded_head_size(call), group = call.heads / call.key_heads;
    const std::size_t first_head = key_head.batch * call.heads + key_head.head * group;
    sums = call.query_grad_parts + (part * call.batch * call.heads + first_head) * of_head;
  }
  table.attention->backward(call, table.random, key_head, first, std::min(each, call.keys - first), sums,
                            scratch);
}

void sum_query_grads(const AttentionCall& call, std::size_t batch, std::size_t head,
                     const KernelTable& table) {
  const std::size_t padded = padded_head_size(call), of_head = call.queries * padded;
  const std::size_t parts = attention_parts(call);
  const float* const first = call.query_grad_parts + (batch * call.heads + head) * of_head;
  std::vector<float> row(padded);
  for (std::size_t query = 0; query < call.queries; ++query) {
    std::fill(row.begin(), row.end(), 0.0F);
    for (std::size_t part = 0; part < parts; ++part) {
      const float* const addend = first + part * call.batch * call.heads * of_head + query * padded;
      for (std::size_t i = 0; i < padded; ++i) row[i] += addend[i];
    }
    for (float& each : row) each *= call.scale;
    cast({row.data(), call.head_size}, call.format, {.overflow = Overflow::NonFinite},
         row_at(call.query_grad, {batch, head}, query), table);
  }
}

void attention_dropout_factors(const AttentionCall& call, std::size_t query, float* factors,
                               const KernelTable& table) {
  dropout_factors(call, table.random, query, 0, call.keys, factors);
}

}  // namespace halfstep
