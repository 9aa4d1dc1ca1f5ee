// The twin that the other tables are compared with, written for reading: a query after another, all keys.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention_inputs.h"

namespace halfstep {
namespace {

using Row = std::vector<float>;

const FormatKernels& casts(const AttentionCall& call) {
  return kScalarKernels.format[static_cast<int>(call.format)];
}

Row load(const AttentionCall& call, const HeadRows& rows, const HeadOf& of, std::size_t row) {
  Row values(call.head_size);
  casts(call).decode(row_at(rows, of, row), values.data(), values.size());
  return values;
}

void store(const AttentionCall& call, const Row& values, const WritableHeadRows& rows, const HeadOf& of,
           std::size_t row) {
  const std::uint32_t inf = traits(call.format).inf_code;
  casts(call).nearest_even(values.data(), row_at(rows, of, row), values.size(),
                           {.overflow = inf, .inf = inf});
}

float dot(const Row& a, const Row& b) {
  float sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add_(Row& sum, float factor, const Row& addend) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * addend[i];
}

HeadOf key_head_of(const AttentionCall& call, const HeadOf& of) {
  return {of.batch, of.head / (call.heads / call.key_heads)};
}

std::size_t keys_seen(const AttentionCall& call, std::size_t query) {
  return call.causal ? std::min(call.keys, query + 1) : call.keys;
}

float masked(const AttentionCall& call, const HeadOf& of, std::size_t query, std::size_t key, float logit) {
  const AttentionMask& mask = call.mask;
  if (mask.type == MaskType::None) return logit;
  return logit + mask_value(mask, mask_place(mask, of, query) + static_cast<std::ptrdiff_t>(key) * mask.key);
}

Row factors_of(const AttentionCall& call, RandomKernel random, const HeadOf& of, std::size_t query) {
  Row factors(call.keys, 1);
  if (call.dropout.threshold > 0)
    dropout_factors(call, random, row_number(call, of, query), 0, call.keys, factors.data());
  return factors;
}

std::size_t no_bytes(const AttentionCall&) { return 0; }
std::size_t no_backward_bytes(const AttentionCall&, std::size_t) { return 0; }

void forward(const AttentionCall& call, RandomKernel random, HeadOf of, std::size_t first_query,
             std::size_t count, void*) {
  const HeadOf key_head = key_head_of(call, of);
  for (std::size_t query = first_query; query < first_query + count; ++query) {
    const Row q = load(call, call.query, of, query);
    Row logits(keys_seen(call, query));
    float top = -kInf;
    for (std::size_t key = 0; key < logits.size(); ++key) {
      logits[key] = masked(call, of, query, key, dot(q, load(call, call.key, key_head, key)) * call.scale);
      top = std::max(top, logits[key]);
    }
    if (top == -kInf) top = 0;
    const Row factors = factors_of(call, random, of, query);
    Row output(call.head_size);
    float sum = 0;
    for (std::size_t key = 0; key < logits.size(); ++key) {
      const float p = std::exp(logits[key] - top);
      sum += p;
      add_(output, p * factors[key], load(call, call.value, key_head, key));
    }
    if (sum != 0)
      for (float& each : output) each /= sum;
    store(call, output, call.output, of, query);
    call.tops[row_number(call, of, query)] = sum == 0 ? 0 : top;
    call.log_sums[row_number(call, of, query)] = sum == 0 ? kInf : std::log(sum);
  }
}

void backward(const AttentionCall& call, RandomKernel random, HeadOf key_head, std::size_t first_key,
              std::size_t count, float* query_sums, void*) {
  const std::size_t group = call.heads / call.key_heads;
  std::vector<Row> key_grads(count, Row(call.head_size)), value_grads = key_grads;
  for (std::size_t member = 0; member < group; ++member) {
    const HeadOf of{key_head.batch, key_head.head * group + member};
    for (std::size_t query = 0; query < call.queries; ++query) {
      const Row q = load(call, call.query, of, query), grad = load(call, call.output_grad, of, query);
      const float along = dot(grad, load(call, readable(call.output), of, query));
      const float top = call.tops[row_number(call, of, query)];
      const float log_sum = call.log_sums[row_number(call, of, query)];
      const Row factors = factors_of(call, random, of, query);
      Row query_grad(call.head_size);
      for (std::size_t key = first_key; key < std::min(first_key + count, keys_seen(call, query)); ++key) {
        const Row k = load(call, call.key, key_head, key), v = load(call, call.value, key_head, key);
        const float p = std::exp(masked(call, of, query, key, dot(q, k) * call.scale) - top - log_sum);
        const float of_logit = p * (dot(grad, v) * factors[key] - along);
        add_(value_grads[key - first_key], p * factors[key], grad);
        add_(key_grads[key - first_key], of_logit, q);
        add_(query_grad, of_logit, k);
      }
      if (query_sums) {
        const std::size_t padded = padded_head_size(call);
        std::fill_n(std::copy(query_grad.begin(), query_grad.end(),
                              query_sums + (member * call.queries + query) * padded),
                    padded - query_grad.size(), 0.0F);
      } else {
        for (float& each : query_grad) each *= call.scale;
        store(call, query_grad, call.query_grad, of, query);
      }
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    for (float& each : key_grads[i]) each *= call.scale;
    store(call, key_grads[i], call.key_grad, key_head, first_key + i);
    store(call, value_grads[i], call.value_grad, key_head, first_key + i);
  }
}

}  // namespace

constinit const AttentionLoops kScalarAttention = {
    .forward_bytes = no_bytes, .forward = forward, .backward_bytes = no_backward_bytes, .backward = backward};

}  // namespace halfstep
