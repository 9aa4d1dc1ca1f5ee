// Attention of BF16 or FP16 rows on the CPU by loops of our own (kernels/attention.h), where LibTorch's
// backward is slow: FP32 inside, no matrix of probabilities, and the same bits on any number of threads.
//
// Backward keeps what LibTorch's flash attention keeps: the three arguments, the mask as it was given, the
// output, and two FP32 numbers a query. Dropout keeps the seed of its random numbers and nothing else.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/attention.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Fewer leave most lanes of a vector without work, as a model that generates does; more than kMostHeadSize
/// was never measured.
constexpr int64_t kFewestQueries = 16, kMostHeadSize = 256;
/// Queries that one thread takes at a time, forward.
constexpr int64_t kQueriesOfTask = 512;
static_assert(kQueriesOfTask % kAttentionQueries == 0);

/// What is not a tensor.
struct Options {
  double dropout;
  bool causal;
  double scale;
};

constexpr double kRandomWords = 0x1p32;

AttentionDropout dropout_of(double probability, int64_t seed) {
  if (probability == 0) return {};
  return {.threshold = static_cast<std::uint32_t>(std::min(probability * kRandomWords, kRandomWords - 1)),
          .factor = static_cast<float>(1 / (1 - probability)),
          .key = {.seed = static_cast<std::uint64_t>(seed)}};
}

at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

HeadRows rows_of(const at::Tensor& heads) {
  return {.codes = static_cast<const std::uint16_t*>(heads.const_data_ptr()),
          .batch = heads.stride(0),
          .head = heads.stride(1),
          .row = heads.stride(2)};
}

WritableHeadRows writable_rows_of(const at::Tensor& heads) {
  return {.codes = static_cast<std::uint16_t*>(heads.mutable_data_ptr()),
          .batch = heads.stride(0),
          .head = heads.stride(1),
          .row = heads.stride(2)};
}

/// Of the sizes of `like`, with the heads of a position side by side, as the layers around attention have
/// them. Not a view: a program may write to what it is given.
at::Tensor empty_heads(const at::Tensor& like) {
  const int64_t size = like.size(3), row = like.size(1) * size;
  return at::empty_strided(like.sizes(), {like.size(2) * row, size, row, 1}, like.options());
}

/// In the order that LibTorch's has: the query's, and after dropout one head behind the other.
at::Tensor empty_output(const at::Tensor& query, bool drops) {
  if (drops) return at::empty(query.sizes(), query.options());
  const at::Tensor like = at::empty_like(query);
  return with_dense_rows(like);  // of heads that are one head, expanded, the order is anybody's
}

AttentionMask mask_of(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  if (!mask.defined()) return {};
  const at::Tensor all = mask.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
  const at::ScalarType type = mask.scalar_type();
  return {.type = type == at::kBool       ? MaskType::Bool
                  : type == at::kBFloat16 ? MaskType::BF16
                  : type == at::kHalf     ? MaskType::FP16
                                          : MaskType::FP32,
          .values = all.const_data_ptr(),
          .batch = all.stride(0),
          .head = all.stride(1),
          .query = all.stride(2),
          .key = all.stride(3)};
}

AttentionCall call_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& mask, const Options& options, int64_t seed) {
  const auto size = [](const at::Tensor& heads, int64_t dimension) {
    return static_cast<std::size_t>(heads.size(dimension));
  };
  return {.format = query.scalar_type() == at::kBFloat16 ? Format::BF16 : Format::FP16,
          .batch = size(query, 0),
          .heads = size(query, 1),
          .key_heads = size(key, 1),
          .queries = size(query, 2),
          .keys = size(key, 2),
          .head_size = size(query, 3),
          .scale = static_cast<float>(options.scale),
          .causal = options.causal,
          .mask = mask_of(mask, query, key),
          .dropout = dropout_of(options.dropout, seed),
          .query = rows_of(query),
          .key = rows_of(key),
          .value = rows_of(value),
          .output = {},
          .output_grad = {},
          .query_grad = {},
          .key_grad = {},
          .value_grad = {}};
}

/// Tops and log_sums, one behind the other.
void set_rows(AttentionCall& call, const at::Tensor& of_rows) {
  call.tops = of_rows.mutable_data_ptr<float>();
  call.log_sums = call.tops + of_rows.numel() / 2;
}

/// Calls body(task, scratch) for every task; each thread has `bytes` of its own. They are allocated at once,
/// so that a step's peak does not depend on which threads run at the same time.
template <typename Body>
void for_each_task(std::size_t tasks, std::size_t bytes, Body body) {
  constexpr std::size_t kLine = 64;
  bytes = (bytes + kLine - 1) / kLine * kLine;
  const bool is_nested = at::in_parallel_region();  // then this thread does all of it
  const auto threads = is_nested ? 1 : std::min(static_cast<std::size_t>(at::get_num_threads()), tasks);
  const c10::DataPtr scratch = c10::GetAllocator(at::kCPU)->allocate(threads * bytes);
  at::parallel_for(0, static_cast<int64_t>(tasks), /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    const auto thread = is_nested ? 0 : static_cast<std::size_t>(at::get_thread_num());
    void* const own = static_cast<std::byte*>(scratch.get()) + thread * bytes;
    for (int64_t task = begin; task < end; ++task) body(static_cast<std::size_t>(task), own);
  });
}

class LowRowsAttention : public torch::autograd::Function<LowRowsAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const std::optional<at::Tensor>& given_mask,
                            const Options& options, int64_t seed) {
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    const at::Tensor output = empty_output(query, options.dropout > 0);
    const at::Tensor of_rows =
        at::empty({2, query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
    AttentionCall call = call_of(query, key, value, mask, options, seed);
    call.output = writable_rows_of(output);
    set_rows(call, of_rows);
    const std::size_t runs = (call.queries + kQueriesOfTask - 1) / kQueriesOfTask;
    for_each_task(call.batch * call.heads * runs, attention_forward_bytes(call),
                  [&](std::size_t task, void* scratch) {
                    const std::size_t head = task / runs, first = task % runs * kQueriesOfTask;
                    attention_forward(call, head / call.heads, head % call.heads, first,
                                      std::min<std::size_t>(kQueriesOfTask, call.queries - first), scratch);
                  });
    context->save_for_backward({query, key, value, mask, output, of_rows});
    context->saved_data["dropout"] = options.dropout;
    context->saved_data["causal"] = options.causal;
    context->saved_data["scale"] = options.scale;
    context->saved_data["seed"] = seed;
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    const variable_list saved = context->get_saved_variables();
    const Options options{.dropout = context->saved_data["dropout"].toDouble(),
                          .causal = context->saved_data["causal"].toBool(),
                          .scale = context->saved_data["scale"].toDouble()};
    const int64_t seed = context->saved_data["seed"].toInt();
    auto grads = at::GradMode::is_enabled() || !is_plain(output_grads[0])
                     ? differentiable_gradients(saved, options, seed, output_grads[0])
                     : gradients(saved, options, seed, output_grads[0]);
    grads.resize(6);  // neither mask nor options have any
    return grads;
  }

 private:
  static variable_list gradients(const variable_list& saved, const Options& options, int64_t seed,
                                 const at::Tensor& given_grad) {
    // A packer may have given them back in another order.
    const at::Tensor query = with_dense_rows(saved[0]), key = with_dense_rows(saved[1]),
                     value = with_dense_rows(saved[2]), output = with_dense_rows(saved[4]),
                     of_rows = saved[5].contiguous(), grad = with_dense_rows(given_grad);
    const at::Tensor query_grad = empty_heads(query), key_grad = empty_heads(key),
                     value_grad = empty_heads(value);
    AttentionCall call = call_of(query, key, value, saved[3], options, seed);
    call.output = writable_rows_of(output);
    set_rows(call, of_rows);
    call.output_grad = rows_of(grad);
    call.query_grad = writable_rows_of(query_grad);
    call.key_grad = writable_rows_of(key_grad);
    call.value_grad = writable_rows_of(value_grad);
    const std::size_t parts = attention_parts(call), heads = call.batch * call.heads;
    at::Tensor query_grad_parts;
    if (parts > 1) {
      query_grad_parts =
          at::empty({static_cast<int64_t>(parts * heads * call.queries * padded_head_size(call))},
                    query.options().dtype(at::kFloat));
      call.query_grad_parts = query_grad_parts.mutable_data_ptr<float>();
    }
    for_each_task(attention_units(call), attention_backward_bytes(call),
                  [&](std::size_t unit, void* scratch) { attention_backward(call, unit, scratch); });
    if (parts > 1) {
      for_each_task(heads, 0, [&](std::size_t head, void*) {
        sum_query_grads(call, head / call.heads, head % call.heads);
      });
    }
    return {query_grad, key_grad, value_grad};
  }

  /// The same in operations that can be differentiated again, with all the memory that this takes.
  static variable_list differentiable_gradients(const variable_list& saved, const Options& options,
                                                int64_t seed, const at::Tensor& given_grad) {
    const at::Tensor &low_query = saved[0], &low_key = saved[1], &mask = saved[3];
    const int64_t batch = low_query.size(0), heads = low_query.size(1), queries = low_query.size(2),
                  key_heads = low_key.size(1), keys = low_key.size(2), size = low_query.size(3);
    // The queries that share a head of keys, one after the other.
    const auto grouped = [&](const at::Tensor& of_queries) {
      return of_queries.to(at::kFloat).reshape({batch, key_heads, heads / key_heads, queries, -1});
    };
    const at::Tensor query = grouped(low_query), grad = grouped(given_grad);
    const at::Tensor key = low_key.to(at::kFloat).unsqueeze(2), value = saved[2].to(at::kFloat).unsqueeze(2);
    at::Tensor logits = at::matmul(query, key.transpose(-2, -1)) * options.scale;
    const double nothing = -std::numeric_limits<double>::infinity();
    const auto seen = at::ones({queries, keys}, at::kBool);
    if (options.causal) logits = logits.masked_fill(seen.tril().logical_not(), nothing);
    if (mask.defined()) {
      const at::Tensor of_heads = mask.expand({batch, heads, queries, keys}).reshape(logits.sizes());
      logits = mask.scalar_type() == at::kBool ? logits.masked_fill(of_heads.logical_not(), nothing)
                                               : logits + of_heads.to(at::kFloat);
    }
    // Of a row that sees no key there is none.
    const at::Tensor sees_any = logits.ne(nothing).any(-1, /*keepdim=*/true);
    const at::Tensor p = at::where(sees_any, at::softmax(at::where(sees_any, logits, 0), -1), 0);
    at::Tensor of_p = at::matmul(grad, value.transpose(-2, -1)), used = p;
    if (options.dropout > 0) {
      const at::Tensor factors = dropout_factors_of(low_query, low_key, options, seed).reshape(p.sizes());
      of_p = of_p * factors;
      used = p * factors;
    }
    const at::Tensor of_logits = p * (of_p - (of_p * p).sum(-1, /*keepdim=*/true)) * options.scale;
    const auto to_low = [&](const at::Tensor& gradient) { return gradient.to(low_query.scalar_type()); };
    return {to_low(at::matmul(of_logits, key)).reshape({batch, heads, queries, size}),
            to_low(at::matmul(of_logits.transpose(-2, -1), query).sum(2)),
            to_low(at::matmul(used.transpose(-2, -1), grad).sum(2))};
  }

  static at::Tensor dropout_factors_of(const at::Tensor& query, const at::Tensor& key, const Options& options,
                                       int64_t seed) {
    const AttentionCall call = call_of(query, key, key, {}, options, seed);
    const at::Tensor factors = at::empty({query.size(0) * query.size(1) * query.size(2), key.size(2)},
                                         query.options().dtype(at::kFloat));
    auto* const values = factors.mutable_data_ptr<float>();
    for_each_task(call.batch * call.heads, 0, [&](std::size_t head, void*) {
      for (std::size_t i = head * call.queries; i < (head + 1) * call.queries; ++i)
        attention_dropout_factors(call, i, values + i * call.keys);
    });
    return factors;
  }
};

/// The arguments of aten::scaled_dot_product_attention.
struct AttentionArguments {
  explicit AttentionArguments(OpArguments given)
      : query(given[0].toTensor()),
        key(given[1].toTensor()),
        value(given[2].toTensor()),
        mask(given_tensor(given[3])),
        dropout(given[4].toDouble()),
        causal(given[5].toBool()),
        scale(given[6].toOptional<double>()),
        shares_heads(given[7].toBool()) {}

  const at::Tensor &query, &key, &value;
  std::optional<at::Tensor> mask;
  double dropout;
  bool causal;
  std::optional<double> scale;
  bool shares_heads;
};

bool is_at_most_fp32(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

/// [batch, heads, rows, head size] on the CPU, of a type that the scope casts, with dense rows.
bool is_heads(const at::Tensor& tensor) {
  return tensor.defined() && kernels_serve(tensor) && !tensor.is_nested() && is_plain(tensor) &&
         tensor.dim() == 4 && tensor.numel() > 0 && is_at_most_fp32(tensor.scalar_type()) &&
         (tensor.stride(-1) == 1 || tensor.size(-1) == 1);
}

bool takes_mask(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  if (!kernels_serve(mask) || !is_plain(mask) || mask.requires_grad() ||
      (mask.dim() != 2 && mask.dim() != 4) ||
      (mask.scalar_type() != at::kBool && !is_at_most_fp32(mask.scalar_type())))
    return false;
  const int64_t all[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (int64_t i = 1; i <= mask.dim(); ++i)
    if (mask.size(-i) != 1 && mask.size(-i) != all[4 - i]) return false;
  return true;
}

bool takes(OpArguments given) {
  const AttentionArguments arguments(given);
  const at::Tensor &query = arguments.query, &key = arguments.key, &value = arguments.value;
  if (!is_heads(query) || !is_heads(key) || !is_heads(value)) return false;
  // Who switches flash attention off asks for LibTorch's plain one.
  if (!at::globalContext().userEnabledFlashSDP()) return false;
  const bool heads_match =
      query.size(1) == key.size(1) || (arguments.shares_heads && query.size(1) % key.size(1) == 0);
  if (!heads_match || key.sizes() != value.sizes() || query.size(0) != key.size(0) ||
      query.size(3) != key.size(3) || query.size(3) > kMostHeadSize || query.size(2) < kFewestQueries)
    return false;
  if (!(arguments.dropout >= 0 && arguments.dropout < 1)) return false;
  return !arguments.mask || (!arguments.causal && takes_mask(*arguments.mask, query, key));
}

/// The output in the scope's type, as LibTorch computes it from arguments that were cast.
at::Tensor run(OpArguments given, const OpContext& context) {
  const AttentionArguments arguments(given);
  // A cast of rows that overlap lays them out anew.
  const auto low = [&](const at::Tensor& tensor) { return with_dense_rows(tensor.to(context.low)); };
  std::optional<at::Tensor> mask = arguments.mask;
  if (mask && mask->is_floating_point()) mask = mask->to(context.low);
  // By an operator, so that a region that is run again draws the same.
  const int64_t seed = arguments.dropout > 0 ? at::empty({1}, at::kLong).random_().item<int64_t>() : 0;
  const auto head_size = static_cast<double>(arguments.query.size(3));
  return LowRowsAttention::apply(low(arguments.query), low(arguments.key), low(arguments.value), mask,
                                 Options{.dropout = arguments.dropout,
                                         .causal = arguments.causal,
                                         .scale = arguments.scale.value_or(1 / std::sqrt(head_size))},
                                 seed);
}

}  // namespace

OwnOp low_rows_attention() {
  return {.op = "scaled_dot_product_attention",
          .rule = OpRule::Low,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = run,
          .run_again = nullptr};  // not cheap
}

}  // namespace halfstep
