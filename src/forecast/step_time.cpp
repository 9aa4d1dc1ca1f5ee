#include "forecast/step_time.h"

#include <algorithm>
#include <vector>

#include "forecast/collectives.h"

namespace halfstep::forecast {
namespace {

/// Seconds of the two passes through a part of the model.
struct Passes {
  double forward = 0, backward = 0;

  Passes& operator+=(const Passes& more) {
    forward += more.forward;
    backward += more.backward;
    return *this;
  }
};

class Roofline {
 public:
  Roofline(const PrecisionPlan& precision, const Device& device) : precision_(precision), device_(device) {}

  /// A product of [rows, inner] and [inner, columns].
  double product(Operands operands, double rows, double inner, double columns) const {
    const double operand_bytes = operands == Operands::Fp4   ? 0.5
                                 : operands == Operands::Fp8 ? 1
                                                             : precision_.activation_bytes();
    const double bytes =
        operand_bytes * (rows * inner + inner * columns) + precision_.activation_bytes() * rows * columns;
    return std::max(2 * rows * inner * columns / device_.flops(operands), traffic(bytes));
  }
  double traffic(double bytes) const { return bytes / device_.memory_bytes_per_second; }
  /// Of elements of activations, read or written.
  double elements(double count) const { return traffic(precision_.activation_bytes() * count); }

  /// A linear layer: one product forward; backward one for each operand's gradient.
  Passes linear(Operands operands, double tokens, double inputs, double outputs) const {
    Passes passes{
        .forward = product(operands, tokens, inputs, outputs),
        .backward = product(operands, tokens, outputs, inputs) + product(operands, outputs, tokens, inputs)};
    if (operands != Operands::Fp8 && operands != Operands::Fp4) return passes;
    // Each operand is read and its codes are written: two in forward, and four in backward, of which the
    // codes of the input were kept.
    const double bytes_each = precision_.activation_bytes() + precision_.code_bytes;
    passes.forward += traffic(bytes_each * (tokens * inputs + inputs * outputs));
    passes.backward += traffic(bytes_each * (2 * tokens * outputs + inputs * outputs));
    return passes;
  }

 private:
  const PrecisionPlan& precision_;
  const Device& device_;
};

/// Causal attention, in one pass over its keys: two products forward, five backward, over half of each.
Passes attention_time(const Roofline& roofline, const ModelShape& shape, const PrecisionPlan& precision,
                      const Arrangement& arrangement, const Device& device) {
  const auto tokens = static_cast<double>(arrangement.micro_batch_tokens());
  const auto length = static_cast<double>(arrangement.sequence_length);
  const auto query = static_cast<double>(shape.query_width()), key = static_cast<double>(shape.key_width());
  const double seconds_of_product =
      tokens * length * query / device.flops(precision.outer_operands());  // 2 operations, half of them
  const double rows = tokens * (2 * query + 2 * key);                      // queries, keys, values, result
  return {.forward = std::max(2 * seconds_of_product, roofline.elements(rows)),
          .backward = std::max(5 * seconds_of_product, roofline.elements(2 * rows))};
}

Passes block_time(const Roofline& roofline, const ModelShape& shape, const PrecisionPlan& precision,
                  const Arrangement& arrangement, const Device& device) {
  const auto tokens = static_cast<double>(arrangement.micro_batch_tokens());
  const auto width = static_cast<double>(shape.width), inner = static_cast<double>(shape.feed_forward_width);
  Passes passes = attention_time(roofline, shape, precision, arrangement, device);
  for (const Linear& linear : shape.block_linears())
    passes += roofline.linear(precision.operands, tokens, static_cast<double>(linear.inputs),
                              static_cast<double>(linear.outputs));
  // Reads and writes of what is no product. Forward: two norms (a read and a write each), two additions (two
  // reads, a write), GELU, or SiLU and a multiplication. Backward: the norms and activations again, their
  // gradients, and two additions of gradients. Rotary positions read and write queries and keys both ways.
  const double turned =
      shape.is_gpt2() ? 0 : 2 * static_cast<double>(shape.query_width() + shape.key_width());
  passes.forward += roofline.elements(tokens * (10 * width + (shape.is_gpt2() ? 2 : 5) * inner + turned));
  passes.backward += roofline.elements(tokens * (16 * width + (shape.is_gpt2() ? 5 : 8) * inner + turned));
  if (arrangement.recomputes_blocks) passes.backward += passes.forward;
  return passes;
}

/// The head, the loss and the embedding.
Passes outer_time(const Roofline& roofline, const ModelShape& shape, const PrecisionPlan& precision,
                  const Arrangement& arrangement) {
  const auto tokens = static_cast<double>(arrangement.micro_batch_tokens());
  const auto width = static_cast<double>(shape.width), vocabulary = static_cast<double>(shape.vocabulary);
  Passes passes = roofline.linear(precision.outer_operands(), tokens, width, vocabulary);
  passes.forward += roofline.elements(tokens * (vocabulary + 4 * width));
  passes.backward += roofline.elements(tokens * (2 * vocabulary + 5 * width));
  return passes;
}

/// Elements of the buckets in which sums travel without sharding: parameters from the last to the first, in
/// buckets of 25 MiB, or one by one where they are larger.
std::vector<double> bucket_elements(const ModelShape& shape) {
  std::vector<int64_t> sizes = shape.first_parameter_sizes();
  for (int64_t layer = 0; layer < shape.layers; ++layer)
    for (const int64_t size : shape.block_parameter_sizes()) sizes.push_back(size);
  for (const int64_t size : shape.last_parameter_sizes()) sizes.push_back(size);
  std::vector<double> buckets;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    const auto elements = static_cast<double>(*size);
    if (buckets.empty() || 4 * (buckets.back() + elements) > kBucketBytes) buckets.push_back(0);
    buckets.back() += elements;
  }
  return buckets;
}

class Exchange {
 public:
  Exchange(const ModelShape& shape, const PrecisionPlan& precision, const Arrangement& arrangement,
           const Device& device)
      : shape_(shape), precision_(precision), arrangement_(arrangement), device_(device) {}

  double seconds(Collective collective, double bytes) const {
    return collective_seconds(collective, bytes, arrangement_.ranks, device_);
  }
  double block_sum() const {
    if (arrangement_.gathers_packed()) return sum(matrices()) + sum(beside_matrices());
    return sum(static_cast<double>(shape_.block_parameters()));
  }
  double outer_sum() const {
    double all = 0;
    for (const int64_t size : shape_.first_parameter_sizes()) all += sum(static_cast<double>(size));
    for (const int64_t size : shape_.last_parameter_sizes()) all += sum(static_cast<double>(size));
    return all;
  }
  double block_gather() const {
    if (!arrangement_.gathers_packed()) return gather(static_cast<double>(shape_.block_parameters()));
    return seconds(Collective::AllGather, kPackedBytes * matrices()) + gather(beside_matrices());
  }
  double outer_gather() const { return gather(static_cast<double>(shape_.outer_parameters())); }
  /// Of all gradients, whole, to every rank.
  double all_sum() const {
    double all = 0;
    for (const double elements : bucket_elements(shape_)) all += whole_sum(elements);
    return all;
  }
  /// Of the bucket with the embedding, whose gradient is the last to be complete.
  double last_bucket_sum() const { return whole_sum(bucket_elements(shape_).back()); }
  double embedding_sum() const { return sum(static_cast<double>(shape_.embedding_weights())); }

 private:
  /// Elements of a block's matrices, and of its biases and norms: where the former are packed, each of the
  /// two travels by itself.
  double matrices() const { return static_cast<double>(shape_.block_matrix_elements()); }
  double beside_matrices() const { return static_cast<double>(shape_.block_parameters()) - matrices(); }
  double whole_sum(double elements) const {
    return seconds(Collective::AllReduce, static_cast<double>(arrangement_.summed_bytes) * elements);
  }
  /// Of which each rank needs its part.
  double sum(double elements) const {
    if (device_.exchanges_by_gloo) return whole_sum(elements);
    return seconds(Collective::ReduceScatter, static_cast<double>(arrangement_.summed_bytes) * elements);
  }
  double gather(double elements) const {
    return seconds(Collective::AllGather, precision_.working_bytes() * elements);
  }

  const ModelShape& shape_;
  const PrecisionPlan& precision_;
  const Arrangement& arrangement_;
  const Device& device_;
};

/// Bytes that inspecting and updating read and write for each parameter.
double update_bytes(const PrecisionPlan& precision, const Arrangement& arrangement) {
  const double gradient = arrangement.has_sums() ? 4 : precision.working_bytes();
  const double state = precision.working_bytes() + precision.master_bytes() + precision.moment_bytes();
  return 2 * gradient + 2 * state;
}

}  // namespace

StepTime step_time(const ModelShape& shape, const PrecisionPlan& precision, const Arrangement& arrangement,
                   const Device& device) {
  const Roofline roofline(precision, device);
  const Exchange exchange(shape, precision, arrangement, device);
  const auto layers = static_cast<double>(shape.layers),
             times = static_cast<double>(arrangement.accumulation);
  const auto parameters = static_cast<double>(shape.parameters());
  const Passes block = block_time(roofline, shape, precision, arrangement, device);
  const Passes outer = outer_time(roofline, shape, precision, arrangement);
  // Each gradient is read and added to its sum, which is read and written.
  const double adding =
      arrangement.has_sums() ? roofline.traffic(parameters * (precision.working_bytes() + 8)) : 0;

  StepTime step;
  step.forward = times * (layers * block.forward + outer.forward);
  step.backward = times * (layers * block.backward + outer.backward + adding);
  const double updated =
      arrangement.shards(Sharding::States) ? parameters / static_cast<double>(arrangement.ranks) : parameters;
  step.update = roofline.traffic(updated * update_bytes(precision, arrangement));
  if (arrangement.ranks == 1) return step;

  // One pass of blocks in backward hides what travels beside it, but not the gradient that is complete last.
  const double hides = layers * block.backward;
  const auto exposed_beside_backward = [&](double exchanged, double last) {
    return std::max(last, exchanged - hides);
  };
  if (!arrangement.shards(Sharding::States)) {
    step.exchanged = exchange.all_sum();
    step.exposed = exposed_beside_backward(step.exchanged, exchange.last_bucket_sum());
    return step;
  }
  const double sums = layers * exchange.block_sum() + exchange.outer_sum();
  const double last = exchange.embedding_sum();
  if (!arrangement.shards(Sharding::Weights)) {
    const double summed_times = arrangement.shards(Sharding::Gradients) ? times : 1;
    const double gathered = layers * exchange.block_gather() + exchange.outer_gather();
    step.exchanged = summed_times * sums + gathered;
    step.exposed = summed_times * exposed_beside_backward(sums, last) + gathered;
    return step;
  }
  // Each block's weights come while the block before is computed; in backward its gradients leave as well.
  // The first weights have nothing before them.
  const double gather = exchange.block_gather(), sum = exchange.block_sum();
  const double forward_waits =
      exchange.outer_gather() + gather + (layers - 1) * std::max(0.0, gather - block.forward);
  const double backward_waits = layers * std::max(0.0, gather + sum - block.backward) + last;
  step.exchanged = times * (exchange.outer_gather() + 2 * layers * gather + sums);
  step.exposed = times * (forward_waits + backward_waits);
  return step;
}

}  // namespace halfstep::forecast
