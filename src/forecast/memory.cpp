#include "forecast/memory.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace halfstep::forecast {
namespace {

/// Bytes of each class at one moment.
struct Moment {
  std::string_view name{};
  double working = 0, master = 0, gradient = 0, moments = 0, activation = 0, cast_cache = 0, other = 0;

  MemoryAmounts amounts() const {
    MemoryAmounts all;
    const double values[] = {working, master, gradient, moments, activation, cast_cache, other};
    for (std::size_t c = 0; c < kMemoryClassCount; ++c) {
      all.by_class[c] = static_cast<std::size_t>(std::llround(values[c]));
      all.total += all.by_class[c];
    }
    return all;
  }
};

/// The sizes that the formulas below are written in.
struct Sizes {
  Sizes(const ModelShape& shape, const PrecisionPlan& precision, const Arrangement& arrangement)
      : tokens(static_cast<double>(arrangement.micro_batch_tokens())),
        width(static_cast<double>(shape.width)),
        query(static_cast<double>(shape.query_width())),
        key(static_cast<double>(shape.key_width())),
        inner(static_cast<double>(shape.feed_forward_width)),
        heads(static_cast<double>(shape.heads)),
        layers(static_cast<double>(shape.layers)),
        logits(tokens * static_cast<double>(shape.vocabulary)),
        embedding(static_cast<double>(shape.embedding_weights())),
        block(static_cast<double>(shape.block_parameters())),
        outer(static_cast<double>(shape.outer_parameters())),
        all(static_cast<double>(shape.parameters())),
        // The stream that blocks add to has the type of the weights.
        stream_bytes(precision.working_bytes()) {}

  double tokens, width, query, key, inner, heads, layers;
  double logits, embedding, block, outer, all;
  double stream_bytes;
};

/// What the forward of one block leaves for its backward. docs/memory.md has the rules: in low precision what
/// norms, GELU and SiLU put out is computed again if a product takes it; with a recipe each linear layer
/// keeps the codes of its input.
double kept_of_block(const ModelShape& shape, const PrecisionPlan& precision, const Sizes& n,
                     bool swiglu_in_one_pass) {
  const double codes = precision.code_bytes, norm_inputs = 2 * n.width,
               heads_apart = shape.has_query_key_norm ? n.query + n.key : 0;
  const double attention = n.query + 2 * n.key + n.query;  // queries, keys, values; what comes out
  // Of each token: the attention's sums of exponentials, and what norms know of their row.
  const double statistics = 4 * n.heads + (shape.is_gpt2() ? 16 : 8);
  if (precision.is_full()) {
    // A composed RMS norm keeps its row between its two factors too.
    const double tensors_of_norm = shape.is_gpt2() ? 2 : 3;
    const double inner = (shape.is_gpt2() ? 2 : 4) * n.inner;
    return n.tokens * (4 * (tensors_of_norm * (norm_inputs + heads_apart) + attention + inner) + statistics);
  }
  double elements = attention + heads_apart, coded = 0;
  if (shape.is_gpt2()) {
    elements += n.inner;
    coded = 3 * n.width + n.inner;
  } else {
    // Gate and the other product; SiLU of the gate, and what down_proj takes: its codes, where there are any.
    elements += (swiglu_in_one_pass ? 2 : precision.has_recipe() ? 3 : 4) * n.inner;
    coded = 5 * n.width + n.query + n.inner;
  }
  return n.tokens * (n.stream_bytes * norm_inputs + 2 * elements + codes * coded + statistics);
}

/// Of the last norm: its input, and in FP32 what it puts out.
double kept_of_last_norm(const ModelShape& shape, const PrecisionPlan& precision, const Sizes& n) {
  if (precision.is_full()) return 4 * n.tokens * n.width * (shape.is_gpt2() ? 2 : 3);
  return n.stream_bytes * n.tokens * n.width;
}

/// What backward has on its way through a block: the gradient of the stream, and those around the widest
/// product.
double passing_in_block(const ModelShape& shape, const PrecisionPlan& precision, const Sizes& n,
                        bool products_in_fp32) {
  const double inner_tensors = shape.is_gpt2() ? 2 : 4;
  double bytes = precision.activation_bytes() * n.tokens * (2 * n.width + inner_tensors * n.inner);
  if (products_in_fp32) bytes += 4 * (n.tokens * (n.inner + 2 * n.width) + 2 * n.inner * n.width);
  return bytes;
}

/// Sums of gradients, FP32, as they lie in buckets.
struct Sums {
  double kept = 0;      ///< from step to step
  double in_block = 0;  ///< more in the backward of a block
  double at_end = 0;    ///< more when the last ones travel
  double last = 0;      ///< of these, what is there only once the last gradients are complete
};

Sums sums_of(const ModelShape& shape, const Arrangement& arrangement, const Sizes& n) {
  if (!arrangement.has_sums()) return {};
  const double part = n.all / static_cast<double>(arrangement.ranks);
  const double copies = arrangement.summed_bytes < 4 ? static_cast<double>(arrangement.summed_bytes) : 0;
  if (!arrangement.shards(Sharding::Gradients))
    return {.kept = 4 * n.all, .at_end = arrangement.ranks > 1 ? copies * n.all : 0};
  // A block is a bucket. One is filled while the two behind it are on their way; the parameters of no block
  // go last, and a head of its own is complete first.
  const auto travelling = static_cast<double>(arrangement.summed_bytes);
  const auto traffic_of = [&](double blocks) { return std::min(2.0, blocks) * n.block * travelling; };
  const double head = shape.is_tied ? 0 : 4 * n.embedding;
  return {.kept = 4 * part,
          .in_block = 4 * n.block + traffic_of(n.layers - 1) + head,
          .at_end = 4 * n.outer + traffic_of(n.layers),
          .last = 4 * n.outer};
}

/// Elements of the groups that parameters travel in after an update, in their order: from the last parameter
/// to the first, each with the last group that has room.
std::vector<double> groups_of(const std::vector<int64_t>& sizes) {
  constexpr double kGroupElements = 25.0 * (1 << 20) / 4;
  std::vector<double> groups;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    const auto elements = static_cast<double>(*size);
    const auto fits = std::find_if(groups.rbegin(), groups.rend(),
                                   [&](double group) { return group + elements <= kGroupElements; });
    fits == groups.rend() ? groups.push_back(elements) : void(*fits += elements);
  }
  return groups;
}

void append(std::vector<int64_t>& sizes, const std::vector<int64_t>& more) {
  sizes.insert(sizes.end(), more.begin(), more.end());
}

/// Elements of the two groups that are on their way together.
double most_on_their_way(const ModelShape& shape) {
  std::vector<int64_t> sizes = shape.first_parameter_sizes();
  for (int64_t layer = 0; layer < shape.layers; ++layer) append(sizes, shape.block_parameter_sizes());
  append(sizes, shape.last_parameter_sizes());
  const std::vector<double> groups = groups_of(sizes);
  double most = groups.front();
  for (std::size_t i = 1; i < groups.size(); ++i) most = std::max(most, groups[i - 1] + groups[i]);
  return most;
}

/// Elements of the largest group that is in no block.
double largest_outer_group(const ModelShape& shape) {
  std::vector<int64_t> sizes = shape.first_parameter_sizes();
  append(sizes, shape.last_parameter_sizes());
  return std::ranges::max(groups_of(sizes));
}

}  // namespace

RankMemory memory_per_rank(const ModelShape& shape, const PrecisionPlan& precision,
                           const Arrangement& arrangement, const Device& device) {
  const Sizes n(shape, precision, arrangement);
  const bool is_full = precision.is_full(), is_emulated = device.products_in_fp32 && !is_full;
  const auto ranks = static_cast<double>(arrangement.ranks);
  const double working_bytes = precision.working_bytes();
  const double states = arrangement.shards(Sharding::States) ? n.all / ranks : n.all;
  const bool comes_and_goes = arrangement.shards(Sharding::Weights);
  double gathered = comes_and_goes ? working_bytes * (n.outer + std::min(2.0, n.layers) * n.block) : 0;
  // The codes of all ranks' parts of the block that comes, and of this rank's.
  if (arrangement.gathers_packed())
    gathered += kPackedBytes * static_cast<double>(shape.block_matrix_elements()) * (1 + 1 / ranks);
  const Sums sums = sums_of(shape, arrangement, n);

  Moment idle{.working = working_bytes * (comes_and_goes ? n.all / ranks : n.all),
              .master = precision.master_bytes() * states,
              .gradient = sums.kept,
              .moments = precision.moment_bytes() * states};

  Moment in_step = idle;
  in_step.working += gathered;
  // FP32 weights are cast for each product, which keeps the cast for its backward.
  const bool casts_weights = !is_full && precision.weights == WeightStorage::Fp32;
  double casts_of_blocks = 0;
  if (casts_weights) {
    casts_of_blocks = 2 * n.layers * static_cast<double>(shape.block_matrix_elements());
    in_step.cast_cache = casts_of_blocks + 2 * n.embedding;
  }
  const double kept = kept_of_block(shape, precision, n, device.swiglu_in_one_pass);
  const double stream = n.stream_bytes * n.tokens * n.width;
  const double of_blocks = n.layers * (arrangement.recomputes_blocks ? stream : kept);
  const double before_head = of_blocks + kept_of_last_norm(shape, precision, n);

  Moment arrival = in_step;
  arrival.name = "weights arrive";
  if (comes_and_goes && device.exchanges_by_gloo) {
    const double block = arrangement.gathers_packed()
                             ? kPackedBytes * static_cast<double>(shape.block_matrix_elements())
                             : working_bytes * n.block;
    arrival.working += std::max(working_bytes * largest_outer_group(shape), block);
    // The second block has begun to arrive by then, or not: runs differ.
    if (n.layers > 1) arrival.working -= working_bytes * n.block / 2;
  }

  // The head's product. Low logits are kept for the loss alone, FP32 ones with their logarithms.
  Moment product = in_step;
  product.name = "the head multiplies";
  product.activation = before_head + (is_full || is_emulated ? 4 : 2) * n.logits;
  if (is_emulated) {
    product.activation += 4 * n.tokens * n.width;
    (casts_weights ? product.activation : product.cast_cache) += 4 * n.embedding;
  }

  Moment loss = in_step;
  loss.name = "the loss is computed";
  loss.activation = before_head + (is_full ? 8 : is_emulated ? 6 : 2) * n.logits;
  if (is_emulated) loss.activation += 4 * n.tokens * n.width;
  // A CPU computes the loss of low logits in FP32, some rows at a time.
  constexpr double kChunkElements = 1 << 18;
  if (!is_full && !is_emulated && device.swiglu_in_one_pass)
    loss.activation += 4 * std::min(n.logits, kChunkElements);

  // The gradient of low logits is written in their place; those of FP32 ones and of their logarithms are both
  // there for a moment.
  Moment head = in_step;
  head.name = "backward is in the head";
  head.activation = before_head + (is_full ? 4 : is_emulated ? 0 : 2) * n.logits;
  head.gradient += is_full       ? 8 * n.logits
                   : is_emulated ? 4 * n.logits + 8 * n.embedding + 8 * n.tokens * n.width
                                 : working_bytes * n.embedding + 2 * n.tokens * n.width;

  // A tied embedding's gradient is complete when backward is through, so the head's part of it waits.
  const double waiting = shape.is_tied || !arrangement.has_sums() ? working_bytes * n.embedding : 0;
  Moment block = in_step;
  block.name = "backward is in the last block";
  block.cast_cache = casts_of_blocks;
  block.activation = of_blocks + (arrangement.recomputes_blocks ? kept : 0);
  block.gradient +=
      sums.in_block + waiting + working_bytes * n.block + passing_in_block(shape, precision, n, is_emulated);

  Moment end = in_step;
  end.name = "backward ends";
  end.cast_cache = 0;
  if (comes_and_goes && n.layers > 1) end.working -= working_bytes * n.block;  // none is on its way any more
  // The two parts of a tied embedding's gradient, and their sum; what comes from a cast is added in place.
  const double embedding_copies = !shape.is_tied ? 0 : casts_weights ? 1 : 2;
  // The parts are gone before the last sums of a rank that keeps a part are made.
  const double passing_embeddings = working_bytes * n.embedding * (1 + embedding_copies);
  end.gradient += arrangement.has_sums()
                      ? sums.at_end + std::max(passing_embeddings - sums.last, working_bytes * n.embedding)
                      : working_bytes * (n.all + embedding_copies * n.embedding);

  Moment update = idle;
  update.name = "the weights are updated";
  if (!arrangement.has_sums()) update.gradient = working_bytes * n.all;
  // Of each of the two groups that are on their way a copy of the part, and of what Gloo gathers one more.
  if (arrangement.shards(Sharding::States) && !comes_and_goes)
    update.working +=
        working_bytes * most_on_their_way(shape) * (1 / ranks + (device.exchanges_by_gloo ? 1 : 0));

  RankMemory found;
  for (const Moment& moment : {arrival, product, loss, head, block, end, update}) {
    const MemoryAmounts amounts = moment.amounts();
    for (std::size_t c = 0; c < kMemoryClassCount; ++c)
      found.class_peaks.by_class[c] = std::max(found.class_peaks.by_class[c], amounts.by_class[c]);
    if (amounts.total > found.at_peak.total) {
      found.at_peak = amounts;
      found.moment = moment.name;
    }
  }
  found.class_peaks.total = found.at_peak.total;
  return found;
}

}  // namespace halfstep::forecast
