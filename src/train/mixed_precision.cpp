#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/precision.h>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>

#include "diagnose/step_observer.h"
#include "diagnose/trace_backward.h"
#include "distributed/sharded_weights.h"
#include "precision/name_pattern.h"
#include "quant/session.h"
#include "scaling/scaler_state.h"
#include "tensor/dense.h"
#include "tensor/faults.h"
#include "tensor/grads_on_device.h"
#include "tensor/param_checks.h"
#include "tensor/transfers.h"
#include "tensor/update_path.h"
#include "tensor/vector_math.h"
#include "train/accumulator.h"
#include "train/backward_root.h"
#include "train/contents.h"
#include "train/grad_hooks.h"
#include "train/weight_file.h"
#include "train/weight_watch.h"

namespace halfstep::train {
namespace {

// LibTorch's one setting for products of FP32 tensors, held for a while.

/// Sets it for the whole process and puts it back. Several may live at a time if they ask for the same.
class Float32ProductsGuard {
 public:
  explicit Float32ProductsGuard(Float32Products products);
  ~Float32ProductsGuard();
  Float32ProductsGuard(const Float32ProductsGuard&) = delete;
  Float32ProductsGuard& operator=(const Float32ProductsGuard&) = delete;
};

const char* setting_of(Float32Products products) {
  switch (products) {
    case Float32Products::Full:
      return "highest";
    case Float32Products::Tf32:
      return "high";
    case Float32Products::Bf16:
      return "medium";
  }
  HALFSTEP_BUG("unknown Float32Products ", static_cast<int>(products));
}

const char* setting_of(at::Float32MatmulPrecision setting) {
  return setting == at::Float32MatmulPrecision::HIGHEST ? "highest"
         : setting == at::Float32MatmulPrecision::HIGH  ? "high"
                                                        : "medium";
}

struct Holders {
  std::mutex mutex;
  int count = 0;
  Float32Products products = Float32Products::Full;
  std::string before;
};

Holders& holders() {
  static Holders all;
  return all;
}

Float32ProductsGuard::Float32ProductsGuard(Float32Products products) {
  Holders& all = holders();
  const std::lock_guard lock(all.mutex);
  HALFSTEP_CHECK(all.count == 0 || all.products == products,
                 "MixedPrecision: another one is training with float32 matmul precision '",
                 setting_of(all.products), "', this one asks for '", setting_of(products),
                 "'. LibTorch has one such setting per process: give both the same, or one process each.");
  if (all.count++ > 0) return;
  all.products = products;
  all.before = setting_of(at::globalContext().float32MatmulPrecision());
  at::globalContext().setFloat32MatmulPrecision(setting_of(products));
}

Float32ProductsGuard::~Float32ProductsGuard() {
  Holders& all = holders();
  const std::lock_guard lock(all.mutex);
  if (--all.count == 0) at::globalContext().setFloat32MatmulPrecision(all.before);
}

}  // namespace
}  // namespace halfstep::train

namespace halfstep {
namespace {

void check_one_device(const train::Contents& contents) {
  const auto& [first_name, first] = contents.parameters.front();
  for (const auto& [name, parameter] : contents.parameters)
    HALFSTEP_CHECK(!parameter.defined() || !first.defined() || parameter.device() == first.device(),
                   "MixedPrecision: parameter '", name, "' is on ", parameter.device(), ", '", first_name,
                   "' on ", first.device(), ". Give each device a MixedPrecision of its own.");
}

/// The loss scale where the gradients are, and the verdicts on past steps that the host has not read. The
/// host's own state follows when it reads them, by the same arithmetic.
struct ScaleOnDevice {
  at::Tensor scale, clean_steps;  // FP32 and Int scalars; undefined without loss scaling
  std::deque<GradSummary> unread;

  static void check(const LossScaling& options) {
    HALFSTEP_CHECK(options.hysteresis == 1, "MixedPrecision: LossScaling::hysteresis is ", options.hysteresis,
                   "; on an accelerator it is 1: LibTorch's operation has no other.");
  }

  void write(const scaling::ScalerState& scaler, at::Device device) {
    const c10::InferenceMode as_for_training(false);  // what is made here outlives an evaluation
    scale = at::full({}, scaler.state.loss_scale, at::TensorOptions(device).dtype(at::kFloat));
    // LibTorch's operation grows the scale where the count is the interval, next_state from there on.
    const int64_t clean = std::min(scaler.state.clean_steps, scaler.options.growth_interval - 1);
    clean_steps = at::full({}, clean, at::TensorOptions(device).dtype(at::kInt));
  }

  void advance(const LossScaling& options, const at::Tensor& found_inf) {
    at::_amp_update_scale_(scale, clean_steps, found_inf, options.growth_factor, options.backoff_factor,
                           options.growth_interval);
    // The nearest that FP32 holds between the two, as the host's.
    const auto held = [&](double bound) {
      LossScaling at_bound = options;
      at_bound.initial = bound;
      return initial_state(at_bound).loss_scale;
    };
    scale.clamp_(held(options.floor), held(options.cap));
  }
};

/// A buffer in the memory of a parameter would be left behind when that gets memory of its own type.
void check_buffers_apart(const Precision& precision, const train::Contents& contents) {
  for (const auto& [name, parameter] : contents.parameters) {
    if (precision.storage_of(name) == WeightStorage::Fp32 || !parameter.has_storage()) continue;
    for (const auto& [buffer_name, buffer] : contents.buffers)
      HALFSTEP_CHECK(!buffer.has_storage() || !buffer.is_alias_of(parameter), "MixedPrecision: buffer '",
                     buffer_name, "' lies in the memory of parameter '", name,
                     "', which gets another type and memory of its own. Make the buffer a clone, or keep the "
                     "parameter in FP32: precision.keep(\"",
                     name, "\").");
  }
}

// Ranks

/// A number for all that must be the same on all ranks of one parameter or buffer.
int64_t fingerprint(const std::string& name, const at::Tensor& tensor) {
  std::string text = name;
  if (tensor.defined())
    text += detail::concat("|", tensor.sizes(), "|", tensor.strides(), "|", tensor.scalar_type(), "|",
                           tensor.requires_grad());
  return static_cast<int64_t>(std::hash<std::string>()(text));
}

/// All of a precision that ranks must have in common.
std::string text_of(const Precision& precision) {
  std::string text = detail::concat(precision.name(), "|", static_cast<int>(precision.weights), "|",
                                    static_cast<int>(precision.float32_products));
  if (const auto& scaling = precision.loss_scaling)
    text += detail::concat("|", scaling->initial, "|", scaling->growth_factor, "|", scaling->backoff_factor,
                           "|", scaling->growth_interval, "|", scaling->hysteresis, "|", scaling->floor, "|",
                           scaling->cap, "|", scaling->max_consecutive_skips);
  for (const WeightRule& rule : precision.weight_rules)
    text += detail::concat("|", rule.pattern, "=", static_cast<int>(rule.storage));
  for (const LayerRule& rule : precision.layer_rules)
    text += detail::concat("|", rule.pattern, "=", rule.quantised);
  return text;
}

/// Better said at once than by sums of different things.
void check_same_on_all_ranks(const MixedPrecisionOptions& options, const Precision& precision,
                             const train::Contents& contents) {
  const Ranks& ranks = options.ranks;
  std::string choices =
      detail::concat(text_of(precision), "|", static_cast<int>(options.accumulation), "|",
                     options.reduction.type, "|", options.reduction.canonical_batches, "|",
                     static_cast<int>(options.sharding), "|", static_cast<int>(options.gather));
  for (const std::string& block : options.blocks) choices += "|" + block;
  std::vector<int64_t> prints{fingerprint(choices, {})};
  for (const auto& [name, parameter] : contents.parameters) prints.push_back(fingerprint(name, parameter));
  for (const auto& [name, buffer] : contents.buffers) prints.push_back(fingerprint(name, buffer));
  const auto gathered = [&](const std::vector<int64_t>& mine) {
    return ranks.gathered(at::tensor(mine, at::kLong));
  };
  // One number for all of them travels to every rank; where it differs, all look closer.
  const std::string_view as_bytes(reinterpret_cast<const char*>(prints.data()),
                                  prints.size() * sizeof prints[0]);
  const at::Tensor brief = gathered({static_cast<int64_t>(contents.parameters.size()),
                                     static_cast<int64_t>(contents.buffers.size()),
                                     static_cast<int64_t>(std::hash<std::string_view>()(as_bytes))});
  const auto* const told = brief.const_data_ptr<int64_t>();
  constexpr std::size_t kTold = 3;
  const auto number_of = [&](int rank, std::size_t i) {
    return told[static_cast<std::size_t>(rank) * kTold + i];
  };
  for (int rank = 1; rank < ranks.size(); ++rank)
    HALFSTEP_CHECK(number_of(rank, 0) == number_of(0, 0) && number_of(rank, 1) == number_of(0, 1),
                   "MixedPrecision: rank ", rank, "'s model has ", number_of(rank, 0), " parameters and ",
                   number_of(rank, 1), " buffers, rank 0's ", number_of(0, 0), " and ", number_of(0, 1),
                   ". All ranks train one model.");
  bool same = true;
  for (int rank = 1; rank < ranks.size(); ++rank) same &= number_of(rank, 2) == number_of(0, 2);
  if (same) return;
  const at::Tensor all = gathered(prints);
  for (int rank = 1; rank < ranks.size(); ++rank)
    for (std::size_t i = 0; i < prints.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      if (all[rank][at].item<int64_t>() == all[0][at].item<int64_t>()) continue;
      HALFSTEP_CHECK(
          i > 0, "MixedPrecision: rank ", rank,
          " and rank 0 have different precisions (their rules and loss scaling included), or options of "
          "how to sum, to accumulate or to shard; this one has ",
          precision.name(), ".");
      const std::size_t parameters = contents.parameters.size();
      const std::string& name =
          i <= parameters ? contents.parameters[i - 1].first : contents.buffers[i - 1 - parameters].first;
      detail::throw_error(detail::concat(
          "MixedPrecision: rank ", rank, "'s model differs from rank 0's, first in what this rank (",
          ranks.rank(), ") calls '", name,
          "': in name, shape, order in memory, type or requires_grad. All ranks train one model."));
    }
}

// Weights that every rank has whole are the same on all, or each trains a model of its own.

constexpr uint64_t kHashFactor = 0x9e3779b97f4a7c15;

/// A number for elements [begin, end) of a dense tensor, as they lie in memory.
uint64_t hash_of_elements(const at::Tensor& tensor, int64_t begin, int64_t end, uint64_t seed) {
  const auto* const bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const int64_t size = tensor.element_size();
  uint64_t hash = seed;
  for (int64_t at = begin * size; at < end * size; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<size_t>(std::min<int64_t>(8, end * size - at)));
    hash = (hash ^ word) * kHashFactor;
    hash ^= hash >> 29;
  }
  return hash;
}

bool can_be_compared(const Param& param) {
  return param.working.requires_grad() && param.working.numel() > 0 &&
         param.working.is_non_overlapping_and_dense();
}

/// Of a few elements of each parameter, and of a longer run of one: other ones in each step. Costs
/// microseconds, and finds in the next step what changes all weights, and a single row in time.
uint64_t sample_of(const std::vector<Param>& params, uint64_t step) {
  constexpr int64_t kFew = 8, kRun = 16384;
  uint64_t hash = 1;
  int64_t total = 0;
  for (const Param& param : params) {
    if (!can_be_compared(param)) continue;
    const int64_t elements = param.working.numel();
    const auto begin = static_cast<int64_t>((step * kHashFactor >> 16) % static_cast<uint64_t>(elements));
    hash = hash_of_elements(param.working, begin, std::min(elements, begin + kFew), hash);
    total += (elements + kRun - 1) / kRun;
  }
  if (total == 0) return hash;
  auto run = static_cast<int64_t>(step % static_cast<uint64_t>(total));
  for (const Param& param : params) {
    if (!can_be_compared(param)) continue;
    const int64_t elements = param.working.numel(), runs = (elements + kRun - 1) / kRun;
    if (run < runs)
      return hash_of_elements(param.working, run * kRun, std::min(elements, (run + 1) * kRun), hash);
    run -= runs;
  }
  return hash;
}

[[noreturn]] void say_which_weights_differ(const Ranks& ranks, const std::vector<Param>& params) {
  std::vector<int64_t> hashes;
  for (const Param& param : params)
    hashes.push_back(can_be_compared(param)
                         ? static_cast<int64_t>(hash_of_elements(param.working, 0, param.working.numel(), 1))
                         : int64_t{0});
  const at::Tensor all = ranks.gathered(at::tensor(hashes, at::kLong));
  std::string where = "in which parameters a gradient is required";
  for (int rank = ranks.size() - 1; rank > 0; --rank)
    for (std::size_t i = hashes.size(); i-- > 0;) {
      const auto at = static_cast<int64_t>(i);
      if (all[rank][at].item<int64_t>() != all[0][at].item<int64_t>())
        where = detail::concat("in '", params[i].name, "' of rank ", rank);
    }
  detail::throw_error(detail::concat(
      "MixedPrecision: ranks no longer have the same weights; first seen ", where,
      ". What a program does between steps must be the same on all ranks: writing to weights, freezing them, "
      "the learning rate, leaving out a step (by an exception that is caught, too)."));
}

void take_first_ranks(const Ranks& ranks, const at::Tensor& tensor) {
  if (ranks.size() == 1 || !tensor.defined() || tensor.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach().contiguous();
  ranks.broadcast(values, 0);
  if (!values.is_alias_of(tensor)) tensor.detach().copy_(values);
}

void check_every_rule_matches(const Precision& precision, const train::Contents& contents) {
  for (const WeightRule& rule : precision.weight_rules) {
    const bool used = std::any_of(contents.parameters.begin(), contents.parameters.end(),
                                  [&](const auto& item) { return matches(rule.pattern, item.first); });
    HALFSTEP_CHECK(used, "MixedPrecision: no parameter's name fits the weight rule '", rule.pattern,
                   "'; the first parameter is '", contents.parameters.front().first,
                   "'. A pattern is the whole name, with * for any characters.");
  }
}

// Shards

constexpr int64_t kBucketBytes = 25 << 20;

/// The shortest beginning of a parameter's name that a pattern fits, or, without patterns, that ends with a
/// number. Empty where none does.
std::string block_of_param(const std::string& name, const std::vector<std::string>& patterns) {
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    const std::string prefix = name.substr(0, dot);
    const std::string last = prefix.substr(prefix.rfind('.') + 1);
    const bool fits = patterns.empty()
                          ? !last.empty() && last.find_first_not_of("0123456789") == std::string::npos
                          : std::ranges::any_of(patterns, [&](const std::string& pattern) {
                              return matches(pattern, prefix);
                            });
    if (fits) return prefix;
  }
  return "";
}

void check_every_block_matches(const std::vector<std::string>& patterns,
                               const std::vector<std::string>& block_of) {
  for (const std::string& pattern : patterns)
    HALFSTEP_CHECK(
        std::ranges::any_of(
            block_of, [&](const std::string& block) { return !block.empty() && matches(pattern, block); }),
        "MixedPrecision: no part of the model fits the block '", pattern,
        "'. A block is the name of a module, with * for any characters: \"layers.*\".");
}

void check_every_layer_rule_matches(const Precision& precision, const std::vector<PlannedWeight>& weights) {
  for (const LayerRule& rule : precision.layer_rules) {
    const bool used = std::any_of(weights.begin(), weights.end(), [&](const PlannedWeight& weight) {
      return matches(rule.pattern, weight.name);
    });
    HALFSTEP_CHECK(used, "MixedPrecision: no weight's name fits the layer rule '", rule.pattern,
                   weights.empty()
                       ? "'; no parameter has two dimensions."
                       : detail::concat("'; the first weight is '", weights.front().name,
                                        "'. A pattern is the whole name, with * for any characters."));
  }
}

/// Weights of two dimensions, in the model's order.
std::vector<PlannedWeight> planned_weights(const train::Contents& contents) {
  std::vector<PlannedWeight> weights;
  for (const auto& [name, tensor] : contents.parameters) {
    if (!tensor.defined() || tensor.dim() != 2) continue;
    const bool is_embedding = std::find(contents.embeddings.begin(), contents.embeddings.end(), name) !=
                                  contents.embeddings.end() ||
                              matches("*embed*", name) || matches("*wte*", name) || matches("*wpe*", name);
    weights.push_back(
        {.name = name, .rows = tensor.size(0), .columns = tensor.size(1), .is_embedding = is_embedding});
  }
  return weights;
}

std::vector<Param> take_in(const Precision& precision, const train::Contents& contents) {
  check_every_rule_matches(precision, contents);
  check_buffers_apart(precision, contents);
  // All before the first is rounded: a model that is refused is left as it was. Memory too: once rounded, two
  // parameters that shared theirs would each have its own, and be tied no more.
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : contents.parameters) {
    check_can_be_param(name, tensor, precision.storage_of(name), precision.compute);
    tensors.push_back({&name, &tensor});
  }
  check_memory_apart("MixedPrecision", tensors);

  std::vector<Param> params;
  for (const auto& [name, tensor] : contents.parameters) {
    params.push_back(make_checked_param(name, tensor, precision.storage_of(name), precision.compute,
                                        /*with_master=*/tensor.requires_grad()));
    params.back().loss_scaled = precision.loss_scaling.has_value();
  }
  return params;
}

const std::string kLossScalePrefix = "loss_scale.";
const std::string kAccumulationPrefix = "accumulation.";
const std::string kRecipePrefix = "recipe.";
const std::string kBufferPrefix = "buffer.";
const std::string kStartOfStepPrefix = "start_of_step.";  // buffers, if a step's sum is saved with them

/// The values under a prefix, by the rest of their names.
StateDict under(const StateDict& saved, const std::string& prefix) {
  StateDict found;
  for (const auto& [name, value] : saved)
    if (name.starts_with(prefix)) found.set(name.substr(prefix.size()), value);
  return found;
}

}  // namespace

struct MixedPrecision::Impl {
  Precision precision;
  MixedPrecisionOptions options;
  std::optional<train::Float32ProductsGuard> float32_products;
  std::vector<Param> params;                 // as the model has them
  std::unique_ptr<ShardedWeights> shards{};  // with sharding: what is updated are parts
  scaling::ScalerState scaler;
  std::shared_ptr<GradReducer> reducer{};  // with ranks
  uint64_t closed_steps = 0;               // over ranks
  std::optional<train::GradAccumulator> accumulator;
  std::optional<train::GradHooks> hooks{};
  train::WeightWatch weights;
  std::optional<train::BufferGuard> buffers;
  std::vector<PlannedWeight> matrices{};   // weights of two dimensions
  std::vector<LayerPlan> layers{};         // with a recipe
  std::shared_ptr<QuantSession> quant{};   // with a recipe
  std::optional<ScaleOnDevice> on_device;  // where parameters are not on the CPU
  std::weak_ptr<StepObserver> observer{};

  std::vector<std::weak_ptr<const GradsOnDevice>> inspected_there{};  // since the last advance
  bool backward_ran = false;                                          // since the last advance
  bool inspected = false;

  Impl(Precision given, train::Contents contents, MixedPrecisionOptions given_options)
      : precision(std::move(given)), options(given_options) {
    precision.check();
    // What BF16 costs is known of CPUs and CUDA; the machine's CPU says nothing of another device.
    if (const at::Tensor& first = contents.parameters.front().second;
        first.defined() && !first.is_cpu() && !first.is_cuda())
      options.autocast.allow_emulated = true;
    // A recipe on a CPU is for its numbers, whatever the CPU does natively.
    if (precision.recipe) options.autocast.allow_emulated = true;
    if (options.cpu_allocator) install_cpu_allocator();
    settle_vector_math();
    // Before the model is touched: it refuses a precision that this machine only emulates.
    if (precision.compute != at::kFloat) {
      const AutocastScope probe(precision.compute, precision.ops, options.autocast);
    }
    if (precision.float32_products != Float32Products::Full)
      float32_products.emplace(precision.float32_products);
    // Without loss scaling a scale that cannot move: skipped steps are counted and limited all the same.
    scaler.options = precision.loss_scaling.value_or(LossScaling{.initial = 1, .floor = 1, .cap = 1});
    scaler.state = initial_state(scaler.options);
    check_one_device(contents);
    // Before the model is touched, too.
    if (const at::Tensor& first = contents.parameters.front().second;
        first.defined() && !kernels_serve(first)) {
      HALFSTEP_CHECK(
          options.accumulation != Accumulation::Bf16Kahan,
          "MixedPrecision: Accumulation::Bf16Kahan is for the CPU. Use Accumulation::Fp32, the same bytes.");
      ScaleOnDevice::check(scaler.options);
      on_device.emplace();
    }
    HALFSTEP_CHECK(
        options.sharding == Sharding::Weights || (options.blocks.empty() && options.gather == Gather::Own),
        "MixedPrecision: options.blocks and Gather::Fp8 are for Sharding::Weights, where weights are "
        "gathered block by block.");
    if (options.ranks.size() == 1) options.sharding = Sharding::None;
    if (options.ranks.size() > 1 || options.reduction.canonical_batches > 0) join_ranks(contents);
    matrices = planned_weights(contents);
    check_every_layer_rule_matches(precision, matrices);
    if (precision.recipe && on_device)
      check_runs_on_device(*precision.recipe, contents.parameters.front().second.device());

    if (precision.recipe) plan_recipe();
    params = take_in(precision, contents);
    if (precision.recipe) begin_recipe();
    std::shared_ptr<ShardLayout> layout;
    if (options.sharding != Sharding::None) layout = shard();
    if (options.ranks.size() > 1 || options.reduction.canonical_batches > 0)
      reducer = std::make_shared<GradReducer>(
          options.ranks, GradReducerOptions{.type = options.reduction.type,
                                            .canonical_batches = options.reduction.canonical_batches,
                                            .bucket_bytes = kBucketBytes,
                                            .shards = std::move(layout),
                                            .keeps_parts_only = options.sharding == Sharding::Gradients ||
                                                                options.sharding == Sharding::Weights});
    buffers.emplace(std::move(contents.buffers), std::move(contents.present_buffers));
    if (reducer) {
      accumulator.emplace(Accumulation::Fp32, reducer);
      hooks.emplace([this](std::size_t i) { accumulator->add_last_of(params, i, scaler.state.loss_scale); });
    } else if (options.accumulation != Accumulation::None) {
      accumulator.emplace(options.accumulation);
    }
    write_scale();
  }

  /// Before the model is touched: all ranks have the same model, and rank 0's values.
  void join_ranks(const train::Contents& contents) {
    HALFSTEP_CHECK(
        !on_device || (options.sharding == Sharding::None && !precision.recipe),
        "MixedPrecision: ranks of a model on ", contents.parameters.front().second.device(), " with ",
        precision.recipe ? "a recipe" : "parts of it on each rank",
        "; that is on the CPU so far. On an accelerator each rank has all of the model, in FP32, BF16 or "
        "FP16.");
    HALFSTEP_CHECK(options.accumulation != Accumulation::Bf16Kahan,
                   "MixedPrecision: sums of several ranks are FP32: Accumulation::Fp32, not Bf16Kahan.");
    GradReducer::check(options.ranks, {.type = options.reduction.type,
                                       .canonical_batches = options.reduction.canonical_batches});
    HALFSTEP_CHECK(options.sharding != Sharding::Weights ||
                       options.reduction.canonical_batches % options.ranks.size() == 0,
                   "MixedPrecision: a canonical sum of ", options.reduction.canonical_batches,
                   " micro-batches with Sharding::Weights on ", options.ranks.size(),
                   " ranks. Weights are gathered on all ranks at the same time, so each needs as many "
                   "micro-batches as the others: a multiple of their number, or Sharding::Gradients.");
    check_same_on_all_ranks(options, precision, contents);
    for (const auto& [name, parameter] : contents.parameters) take_first_ranks(options.ranks, parameter);
    for (const auto& [name, buffer] : contents.buffers) take_first_ranks(options.ranks, buffer);
  }

  /// What an optimizer updates.
  const std::vector<Param>& updated() const { return shards ? shards->parts() : params; }

  std::shared_ptr<ShardLayout> shard() {
    std::vector<std::string> block_of(params.size());
    if (options.sharding == Sharding::Weights) {
      for (std::size_t i = 0; i < params.size(); ++i)
        block_of[i] = block_of_param(params[i].name, options.blocks);
      check_every_block_matches(options.blocks, block_of);
    }
    auto layout =
        std::make_shared<ShardLayout>(lay_out_shards(params, block_of,
                                                     {.ranks = options.ranks.size(),
                                                      .group_bytes = kBucketBytes,
                                                      .packs_matrices = options.gather == Gather::Fp8}));
    shards = std::make_unique<ShardedWeights>(options.ranks, *layout, params,
                                              options.sharding == Sharding::Weights);
    for (Param& param : params) param.master = at::Tensor();  // the parts have theirs
    return layout;
  }

  /// Takes in what somebody has put in the place of weights.
  void take_changes() {
    if (shards) shards->check_in_place();
    for (const Param& param : updated()) take_replaced(param);
  }

  void close_sum() {
    if (!accumulator) return;
    if (!reducer || accumulator->closed()) return accumulator->close(params, updated());
    // Largest magnitudes that the recipe has noted, and which buffers forward has changed.
    std::vector<int32_t> numbers = quant ? quant->of_step() : std::vector<int32_t>();
    const std::size_t amaxes = numbers.size();
    const train::NamedBuffers& present = buffers->buffers();
    for (std::size_t i = 0; i < present.size(); ++i) {
      // By its values: a batch norm's own operation writes without a trace in the version.
      // On an accelerator that would wait for it: there all that a step may change are rank 0's.
      const at::Tensor before = buffers->at_start_of_step(i);
      numbers.push_back(before.defined() && (on_device || !before.equal(present[i].second)));
    }
    // In which order blocks came to each rank, as the largest and, below zero, the smallest.
    const std::size_t order_at = numbers.size();
    const int32_t order = shards ? shards->order() : 0;
    numbers.insert(numbers.end(), {order, -order});
    const bool compares = options.ranks.size() > 1 && options.sharding != Sharding::Weights && !on_device;
    const auto sample = static_cast<int32_t>(compares ? sample_of(params, closed_steps) >> 33 : 0);
    ++closed_steps;
    numbers.insert(numbers.end(), {sample, -sample});
    accumulator->close(params, updated(), &numbers);
    if (numbers[order_at + 2] != -numbers[order_at + 3]) say_which_weights_differ(options.ranks, params);
    HALFSTEP_CHECK(
        numbers[order_at] == -numbers[order_at + 1],
        "MixedPrecision: ranks have used the blocks of the model in different orders, so that the "
        "weights which they gathered were not those of one block. With Sharding::Weights every rank's "
        "forward takes the same path through the model; use Sharding::Gradients otherwise.");
    if (quant) quant->set_of_step({numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(amaxes)});
    for (std::size_t i = 0; i < present.size(); ++i)
      if (numbers[amaxes + i]) take_first_ranks(reducer->ranks(), present[i].second);
  }

  at::Tensor root_of(const at::Tensor& loss) {
    const int ranks = options.ranks.size();
    if (on_device && precision.loss_scaling)
      return train::backward_root(loss, &on_device->scale, ranks, options.reduction);
    const double scale = scaler.state.loss_scale;
    return train::backward_root(loss, precision.loss_scaling ? &scale : nullptr, ranks, options.reduction);
  }

  /// Whether the gradients of this backward may leave before it is over.
  bool may_leave_early(const BackwardOptions& backward) const {
    return reducer && !reducer->canonical() &&
           (backward.last || options.accumulation == Accumulation::None || reducer->sends_each_micro_batch());
  }

  void plan_recipe() {
    layers = precision.plan_layers(matrices);
    const bool any = std::ranges::any_of(layers, [](const LayerPlan& layer) { return layer.quantised; });
    HALFSTEP_CHECK(any, "MixedPrecision: recipe ", precision.name(), " covers none of the model's ",
                   layers.size(), " weights of two dimensions",
                   layers.empty()
                       ? std::string()
                       : detail::concat(" ('", layers.front().name, "': ", layers.front().reason, ")"),
                   ". Use Precision::bf16(), or name the weights: precision.quantise(\"name\").");
  }

  void begin_recipe() {
    quant = std::make_shared<QuantSession>();
    for (const LayerPlan& layer : layers) {
      if (!layer.quantised) continue;
      const auto param = std::find_if(params.begin(), params.end(),
                                      [&](const Param& each) { return each.name == layer.name; });
      quant->add(param->working, layer.name, *precision.recipe);
    }
  }

  void write_scale() {
    if (on_device && precision.loss_scaling) on_device->write(scaler, params.front().working.device());
  }

  /// Brings the host's state up to what the device has told so far; with `wait`, up to now.
  /// Says so where the limit of skipped steps was passed, which only advance lets happen.
  std::optional<SkipLimitError> take_verdicts(bool wait) {
    std::optional<SkipLimitError> passed_limit;
    if (!on_device) return passed_limit;
    auto& unread = on_device->unread;
    while (!unread.empty() && (wait || unread.front().on_device()->arrived())) {
      const GradSummary grads = unread.front();
      unread.pop_front();
      scaler.state = next_state(scaler.options, scaler.state, grads.finite());
      try {
        scaling::check_skip_limit("MixedPrecision", scaler.options, scaler.state, grads.first_bad());
      } catch (const SkipLimitError& error) {
        if (!passed_limit) passed_limit.emplace(error);
      }
    }
    return passed_limit;
  }

  /// advance, where only the device knows whether the step was skipped.
  void advance_on_device(const GradSummary& grads) {
    const bool of_this_step = std::any_of(inspected_there.begin(), inspected_there.end(),
                                          [&](const auto& each) { return each.lock() == grads.on_device(); });
    HALFSTEP_CHECK(of_this_step,
                   "MixedPrecision: advance with gradients of another step. Call it once per step, with what "
                   "inspect_grads returned in that step.");
    inspected_there.clear();
    weights.end_step(params);
    if (accumulator) accumulator->begin_step();
    inspected = backward_ran = false;
    buffers->end_step_on_device(grads);
    if (quant) quant->end_step_on_device(grads.on_device()->found_inf);

    if (precision.loss_scaling) on_device->advance(scaler.options, grads.on_device()->found_inf);
    on_device->unread.push_back(grads);
    if (const auto passed_limit = take_verdicts(/*wait=*/false)) throw *passed_limit;
    // No limit of skipped steps is passed unseen.
    const int64_t most = scaler.options.max_consecutive_skips;
    if (most > 0 && scaler.state.consecutive_skips + static_cast<int64_t>(on_device->unread.size()) >= most)
      if (const auto passed_limit = take_verdicts(/*wait=*/true)) throw *passed_limit;
  }

  /// Autograd would add to it: in the parameter's own low precision, which rounds away what later
  /// micro-batches add; with an accumulator, to the sum of a step that is over.
  void check_no_grad_left() const {
    for (const Param& param : updated())
      HALFSTEP_CHECK((param.storage == WeightStorage::Fp32 && !accumulator &&
                      (backward_ran || !precision.loss_scaling)) ||
                         !param.working.grad().defined(),
                     "MixedPrecision: backward, but '", param.name, "' still has a gradient, of type ",
                     param.working.grad().scalar_type(),
                     ", which autograd would add to. Call optimizer.zero_grad() after each step; set "
                     "requires_grad_(false) on a parameter that no optimizer updates; ask for "
                     "Accumulation::Fp32 if several micro-batches or losses are meant.");
  }

  /// A gradient that backward() did not make carries no loss scale. The accumulator looks at its own.
  void check_backward_ran() const {
    if (backward_ran || inspected || accumulator || !precision.loss_scaling) return;
    for (const Param& param : params)
      HALFSTEP_CHECK(!param.working.grad().defined(), "MixedPrecision: inspect_grads, but '", param.name,
                     "' has a gradient that MixedPrecision::backward did not make, so that it does not carry "
                     "the loss scale. Call mp.backward(loss) where the loop calls loss.backward().");
  }

  /// What state_dict saves, with the tensors themselves.
  StateDict live_state();

  GradSummary inspect(GradDetail detail) {
    if (on_device && accumulator && accumulator->has_bad_micro_batch()) {
      take_verdicts(/*wait=*/true);
      return accumulator->bad_summary(scaler.state.loss_scale);
    }
    if (on_device)
      return accumulator ? accumulator->summary_on_device(params, on_device->scale, detail)
                         : inspect_on_device(params, on_device->scale, detail);
    const double scale = scaler.state.loss_scale;
    return accumulator ? accumulator->summary(updated(), scale, detail)
                       : halfstep::inspect_grads(params, scale, detail);
  }

  /// What needs all of the weights in one process.
  void check_whole(const char* call) const {
    HALFSTEP_CHECK(
        !shards, "MixedPrecision: ", call,
        " of a sharded model: each rank has a part of its weights. Save the states of all ranks, and "
        "load them in one process.");
  }

  /// Forward has changed buffers already, and whether the step will be skipped is not known before its end.
  void check_between_steps(const char* call) const {
    HALFSTEP_CHECK(!inspected && !backward_ran && !(accumulator && accumulator->micro_batches() > 0),
                   "MixedPrecision: ", call,
                   " in the middle of a step would mix the weights of one step with the buffers of the next. "
                   "Call it after mp.advance(grads), or drop the step with mp.zero_grad() first.");
  }

  void check_advanced(const char* call) const {
    HALFSTEP_CHECK(
        !inspected, "MixedPrecision: ", call,
        " after inspect_grads, but advance was not called for that step. Without it the loss scale never "
        "changes and skipped steps are not counted: call mp.advance(grads) after optimizer.step.");
  }
};

MixedPrecision::ForwardScope::ForwardScope(const MixedPrecision& mp) : memory_(MemoryClass::Activation) {
  mp.impl_->take_changes();
  if (mp.impl_->shards) {
    mp.impl_->shards->follow_requires_grad();
    shards_ = std::make_shared<ShardedWeights::Use>(*mp.impl_->shards, ShardedWeights::Pass::Forward);
  }
  if (at::GradMode::is_enabled()) mp.impl_->buffers->begin_step();
  const Precision& precision = mp.impl_->precision;
  if (precision.compute != at::kFloat)
    autocast_.emplace(precision.compute, precision.ops, mp.impl_->options.autocast, mp.impl_->quant);
  if (const auto observer = mp.impl_->observer.lock()) observed_ = observer->begin_forward(mp.impl_->params);
}

MixedPrecision::ForwardScope::~ForwardScope() = default;

MixedPrecision::MixedPrecision(Precision precision, torch::nn::Module& model, MixedPrecisionOptions options)
    : MixedPrecision(std::move(precision), std::vector<NamedModel>{{.name = "", .model = model}}, options) {}
MixedPrecision::MixedPrecision(Precision precision, const std::vector<NamedModel>& models,
                               MixedPrecisionOptions options)
    : impl_(std::make_unique<Impl>(std::move(precision), train::contents_of(models), options)) {}
MixedPrecision::MixedPrecision(Precision precision, torch::jit::Module& model, MixedPrecisionOptions options)
    : impl_(std::make_unique<Impl>(std::move(precision), train::contents_of(model), options)) {}
MixedPrecision::MixedPrecision(Precision precision, const std::vector<NamedParameter>& parameters,
                               MixedPrecisionOptions options)
    : impl_(std::make_unique<Impl>(std::move(precision), train::contents_of(parameters), options)) {}
MixedPrecision::~MixedPrecision() = default;
MixedPrecision::MixedPrecision(MixedPrecision&&) noexcept = default;
MixedPrecision& MixedPrecision::operator=(MixedPrecision&&) noexcept = default;

const std::vector<Param>& MixedPrecision::params() const { return impl_->updated(); }
std::vector<Param> MixedPrecision::params(std::string_view prefix) const {
  std::vector<Param> found;
  for (const Param& param : params())
    if (param.name.starts_with(std::string(prefix) + ".")) found.push_back(param);
  HALFSTEP_CHECK(!found.empty(), "MixedPrecision: no parameter's name begins with '", prefix,
                 ".'; the first parameter is '", impl_->params.front().name, "'.");
  return found;
}
void MixedPrecision::set_observer(std::weak_ptr<StepObserver> observer) {
  impl_->observer = std::move(observer);
}
const Precision& MixedPrecision::precision() const { return impl_->precision; }
const Ranks& MixedPrecision::ranks() const { return impl_->options.ranks; }
const RankReduction& MixedPrecision::reduction() const { return impl_->options.reduction; }
Accumulation MixedPrecision::accumulation() const { return impl_->options.accumulation; }
Sharding MixedPrecision::sharding() const { return impl_->options.sharding; }
const std::vector<LayerPlan>& MixedPrecision::layers() const { return impl_->layers; }
std::vector<LayerPlan> MixedPrecision::layers_under(const Precision& precision) const {
  return precision.plan_layers(impl_->matrices);
}
std::int64_t MixedPrecision::quantised_uses(std::string_view weight) const {
  if (!impl_->quant) return 0;
  for (const auto& layer : impl_->quant->layers())
    if (layer->name() == weight) return layer->uses();
  const bool is_weight =
      std::ranges::any_of(impl_->layers, [&](const LayerPlan& each) { return each.name == weight; });
  HALFSTEP_CHECK(is_weight, "MixedPrecision: no weight of two dimensions is called '", weight,
                 "'; mp.layers() has the names.");
  return 0;
}
const PrecisionSupport& MixedPrecision::support() const {
  return precision_support(impl_->precision.compute);
}
std::optional<QuantisedShares> MixedPrecision::take_quantised_shares() {
  if (!impl_->quant) return std::nullopt;
  const auto share = [](int64_t count, int64_t elements) {
    return static_cast<double>(count) / static_cast<double>(elements);
  };
  QuantiseShares sum;
  QuantisedShares shares;
  double highest_saturated = 0.0, highest_vanished = 0.0;
  const auto note = [](double found, const std::string& name, double& highest, std::string& most) {
    if (found > highest) highest = found, most = name;
  };
  for (const auto& layer : impl_->quant->layers()) {
    QuantiseShares own;
    for (int role = 0; role < kRoles; ++role) {
      const QuantiseShares found = layer->take_shares(static_cast<Role>(role));
      own.elements += found.elements;
      own.saturated += found.saturated;
      own.vanished += found.vanished;
    }
    if (own.elements == 0) continue;
    note(share(own.saturated, own.elements), layer->name(), highest_saturated, shares.most_saturated);
    note(share(own.vanished, own.elements), layer->name(), highest_vanished, shares.most_vanished);
    sum.elements += own.elements;
    sum.saturated += own.saturated;
    sum.vanished += own.vanished;
  }
  if (sum.elements == 0) return std::nullopt;
  shares.saturated = share(sum.saturated, sum.elements);
  shares.vanished = share(sum.vanished, sum.elements);
  return shares;
}
double MixedPrecision::loss_scale() const { return loss_scale_state().loss_scale; }
const LossScaleState& MixedPrecision::loss_scale_state() const {
  impl_->take_verdicts(/*wait=*/true);
  return impl_->scaler.state;
}

void MixedPrecision::set_loss_scaling(const LossScaling& options) {
  HALFSTEP_CHECK(impl_->precision.loss_scaling, "MixedPrecision: ", impl_->precision.name(),
                 " has no loss scale to set rules for. Precision::fp16() has.");
  options.check();
  if (impl_->on_device) ScaleOnDevice::check(options);
  impl_->check_advanced("set_loss_scaling");
  LossScaling from_here = options;
  from_here.initial = std::clamp(loss_scale(), options.floor, options.cap);
  const double scale = initial_state(from_here).loss_scale;  // as FP32 holds it
  const bool has_gradients =
      impl_->backward_ran || (impl_->accumulator && impl_->accumulator->micro_batches() > 0);
  HALFSTEP_CHECK(!has_gradients || scale == loss_scale(),
                 "MixedPrecision: set_loss_scaling would change the loss scale from ", loss_scale(), " to ",
                 scale,
                 ", and gradients of this step carry the first. Call it between steps, after advance.");
  impl_->precision.loss_scaling = impl_->scaler.options = options;
  impl_->scaler.state.loss_scale = scale;
  impl_->write_scale();
}

void MixedPrecision::backward(const at::Tensor& loss, BackwardOptions options) {
  HALFSTEP_CHECK(loss.defined() && loss.numel() == 1,
                 "MixedPrecision: backward needs a loss of one element, not ",
                 loss.defined() ? detail::concat("a tensor of shape ", loss.sizes()) : "an undefined tensor",
                 ". Take its mean or sum first.");
  impl_->check_advanced("backward");
  HALFSTEP_CHECK(
      !impl_->accumulator || !impl_->accumulator->closed(),
      "MixedPrecision: backward, but the sum of this step's micro-batches is closed. The order of a "
      "step is backward for each micro-batch, close_sum, inspect_grads, optimizer.step, advance; "
      "mp.zero_grad() starts the step again.");
  impl_->check_no_grad_left();
  if (!impl_->accumulator) impl_->weights.begin_backward(impl_->params);
  HALFSTEP_CHECK(
      !impl_->reducer || impl_->options.accumulation != Accumulation::None || impl_->reducer->canonical() ||
          !impl_->backward_ran,
      "MixedPrecision: a second backward in one step, whose gradients are with the other ranks already. Ask "
      "for Accumulation::Fp32 where several losses or micro-batches make a step.");
  const MemoryClassScope memory(MemoryClass::Gradient);
  const at::Tensor root = impl_->root_of(loss);
  if (impl_->reducer) impl_->accumulator->begin_backward(impl_->params);
  try {
    std::optional<ShardedWeights::Use> use;
    if (impl_->shards) use.emplace(*impl_->shards, ShardedWeights::Pass::Backward);
    std::optional<train::GradHooks::Armed> armed;
    if (impl_->may_leave_early(options)) {
      impl_->accumulator->begin_pieces();
      armed.emplace(*impl_->hooks, impl_->params);
    }
    diagnose::watch_backward(root);
    root.backward({}, options.retain_graph);
  } catch (...) {
    // What it had made until then is no micro-batch.
    if (impl_->accumulator)
      for (const Param& param : impl_->params) param.working.mutable_grad().reset();
    if (impl_->reducer && impl_->may_leave_early(options)) impl_->accumulator->begin_step();
    throw;
  }
  impl_->backward_ran = true;
  if (impl_->accumulator && impl_->on_device)
    impl_->accumulator->add_micro_batch_on_device(impl_->params, impl_->on_device->scale);
  else if (impl_->accumulator)
    impl_->accumulator->add_micro_batch(impl_->params, loss_scale());
  else
    impl_->weights.end_backward(impl_->params);
}

void MixedPrecision::close_sum() { impl_->close_sum(); }

GradSummary MixedPrecision::inspect_grads(GradDetail detail) const {
  if (impl_->inspected && impl_->weights.another_step(impl_->updated()))
    impl_->check_advanced("inspect_grads of the next step");
  impl_->check_backward_ran();
  // Without accumulation there is no sum that a caller knows of.
  if (impl_->reducer && impl_->options.accumulation == Accumulation::None && !impl_->accumulator->closed())
    impl_->close_sum();
  HALFSTEP_CHECK(
      !impl_->accumulator || impl_->accumulator->closed(),
      "MixedPrecision: inspect_grads, but the sum of this step's micro-batches is still open. Call "
      "mp.close_sum() after the last backward of a step.");
  const GradSummary summary = impl_->inspect(detail);
  if (summary.on_device()) impl_->inspected_there.push_back(summary.on_device());
  if (!impl_->inspected) impl_->weights.note(impl_->updated());
  if (const auto observer = impl_->observer.lock(); observer && !impl_->inspected)
    observer->see_gradients(impl_->updated());
  impl_->inspected = summary.any();
  return summary;
}

void MixedPrecision::zero_grad() {
  for (const Param& param : impl_->params) param.working.mutable_grad().reset();
  for (const Param& param : impl_->updated()) param.working.mutable_grad().reset();
  if (impl_->accumulator) impl_->accumulator->begin_step();
  impl_->inspected = impl_->backward_ran = false;
  impl_->inspected_there.clear();
  impl_->buffers->abandon();
  if (impl_->quant) impl_->quant->drop_step();
  if (const auto observer = impl_->observer.lock()) observer->drop_step();
}

void MixedPrecision::advance(const GradSummary& grads) {
  HALFSTEP_CHECK(impl_->inspected || !grads.any(),
                 "MixedPrecision: advance, but inspect_grads was not called since the last advance. Call "
                 "each of them once per step: inspect_grads, optimizer.step, advance.");
  if (const auto observer = impl_->observer.lock()) observer->end_step(impl_->updated());
  if (impl_->on_device && grads.on_device() && grads.any()) return impl_->advance_on_device(grads);
  impl_->take_verdicts(/*wait=*/true);
  impl_->inspected_there.clear();
  auto& [options, state] = impl_->scaler;
  HALFSTEP_CHECK(!grads.any() || grads.loss_scale() == state.loss_scale,
                 "MixedPrecision: advance with gradients that carry a loss "
                 "scale of ",
                 grads.loss_scale(), "; the present one is ", state.loss_scale,
                 ". Call it once per step, with what inspect_grads returned in that step.");
  if (impl_->inspected && grads.any()) impl_->weights.end_step(impl_->updated());
  if (impl_->shards && grads.any() && grads.finite()) impl_->shards->share_update();
  if (impl_->accumulator) impl_->accumulator->begin_step();
  impl_->inspected = impl_->backward_ran = false;
  impl_->buffers->end_step(/*skipped=*/grads.any() && !grads.finite());
  if (impl_->quant) impl_->quant->end_step(/*skipped=*/!grads.any() || !grads.finite());
  if (!grads.any()) return;  // neither a clean step nor a skipped one
  state = next_state(options, state, grads.finite());
  impl_->write_scale();
  scaling::check_skip_limit("MixedPrecision", options, state, grads.first_bad());
}

// Weights and buffers by name, as they lie in memory: visit(name, tensor). A frozen parameter's master is
// saved without elements.
template <typename Visit>
static void for_each_tensor(const std::vector<Param>& params, const train::NamedBuffers& buffers,
                            Visit visit) {
  for (const Param& param : params) {
    if (param.is_part() && param.working.numel() == 0) continue;
    visit(saved_name("working." + param.name, param), param.working);
    if (param.master.defined()) visit(saved_name("master." + param.name, param), param.master);
  }
  for (const auto& [name, buffer] : buffers) visit(kBufferPrefix + name, buffer);
}

StateDict MixedPrecision::Impl::live_state() {
  take_verdicts(/*wait=*/true);
  if (on_device && accumulator) accumulator->read_micro_batches();
  take_changes();
  StateDict saved;
  saved.set("precision", precision.name());
  saved.set("weights", std::string(to_string(precision.weights)));
  for_each_tensor(updated(), buffers->buffers(), [&](const std::string& name, const at::Tensor& tensor) {
    saved.set(name, tensor.detach());
  });
  // Of parts, how the whole lies in memory: they are runs of that.
  if (shards)
    for (const Param& param : params) saved.set("layout." + param.name, layout_text(param.working));
  for (const auto& [name, value] : scaling::saved_form(scaler)) saved.set(kLossScalePrefix + name, value);
  const StateDict sum = accumulator ? accumulator->live_form(params) : StateDict();
  // Without a sum the step under way is not saved, and what a forward has noted of it belongs to it.
  if (quant)
    for (const auto& [name, value] : quant->state_dict(/*step_under_way=*/sum.size() > 0))
      saved.set(kRecipePrefix + name, value);
  for (const auto& [name, value] : sum) saved.set(kAccumulationPrefix + name, value);
  for (std::size_t i = 0; i < buffers->buffers().size() && sum.size() > 0; ++i)
    if (const at::Tensor values = buffers->at_start_of_step(i); values.defined())
      saved.set(kStartOfStepPrefix + buffers->buffers()[i].first, values);
  return saved;
}

StateDict MixedPrecision::state_dict() const { return on_host(impl_->live_state()); }

void MixedPrecision::save_weights(const std::filesystem::path& path, torch::nn::Module& model,
                                  c10::ScalarType type) const {
  impl_->check_between_steps("save_weights");
  impl_->check_whole("save_weights");
  train::write_weights(path, model, impl_->params, type);
}
void MixedPrecision::save_weights(const std::filesystem::path& path, torch::jit::Module& model,
                                  c10::ScalarType type) const {
  impl_->check_between_steps("save_weights");
  impl_->check_whole("save_weights");
  train::write_weights(path, model, impl_->params, type);
}

void MixedPrecision::load_state_dict(const StateDict& saved) {
  const at::NoGradGuard no_grad;
  const StateDict present = impl_->live_state();
  // The sum of micro-batches and what belongs to it are there or not, as the step was begun or not; the
  // accumulator looks at its names.
  const auto is_of_a_step = [&](const std::string& name) {
    return impl_->accumulator && (name.starts_with(kAccumulationPrefix) ||
                                  (name.starts_with(kStartOfStepPrefix) &&
                                   present.contains(kBufferPrefix + name.substr(kStartOfStepPrefix.size()))));
  };
  // First: another precision has other names, and the list of those would not say why.
  for (const char* name : {"precision", "weights"})
    HALFSTEP_CHECK(
        !saved.contains(name) || saved.text(name) == present.text(name),
        "MixedPrecision: the saved state is of ", name, " ", saved.text(name), ", this one is ",
        present.text(name),
        ". Continue with the same, or begin another run with the weights alone: full_precision, or for "
        "halfstep train a new --folder with model.from=RUN/model.");
  const std::string casts = kRecipePrefix + "casts.";
  const auto check_layers = [&](const StateDict& has, const StateDict& other, const char* where,
                                const char* elsewhere) {
    for (const auto& [name, value] : has)
      HALFSTEP_CHECK(
          !name.starts_with(casts) || other.contains(name), "MixedPrecision: '",
          name.substr(std::min(casts.size(), name.size())), "' follows the recipe ", where, ", not ",
          elsewhere,
          ". Build it with the same layer rules: precision.keep_high and quantise, or precision.keep_high of "
          "a run's configuration.");
  };
  check_layers(saved, present, "in the saved state", "here");
  check_layers(present, saved, "here", "in the saved state");
  std::vector<std::string_view> names;
  for (const auto& [name, value] : present)
    if (!is_of_a_step(name)) names.push_back(name);
  for (const auto& [name, value] : saved)
    if (is_of_a_step(name)) names.push_back(name);
  saved.expect_exactly("MixedPrecision", names);

  Faults faults;
  if (impl_->shards)
    for (const Param& param : impl_->params)
      faults.expect(saved.text("layout." + param.name) == present.text("layout." + param.name), "'",
                    param.name, "' was saved in parts of ", saved.text("layout." + param.name),
                    " and is stored in memory as ", present.text("layout." + param.name), " here");
  for (const Param& param : impl_->updated()) {
    if (param.is_part() && param.working.numel() == 0) continue;
    const std::string working_name = saved_name("working." + param.name, param);
    faults.expect_like(working_name, saved.tensor(working_name), param.working);
    if (!param.master.defined()) continue;
    // One without elements is that of a parameter that had been frozen until then.
    const std::string master_name = saved_name("master." + param.name, param);
    const at::Tensor& master = saved.tensor(master_name);
    faults.expect(master.defined() && master.scalar_type() == param.master.scalar_type() &&
                      (master.numel() == 0 || master.sizes() == param.working.sizes()),
                  "'", master_name, "' is ",
                  master.defined() ? detail::concat(master.scalar_type(), " of shape ", master.sizes())
                                   : "an undefined tensor",
                  ", expected ", param.master.scalar_type(), " of shape ", param.working.sizes());
  }
  std::vector<at::Tensor> at_start_of_step;
  for (const auto& [name, buffer] : impl_->buffers->buffers()) {
    faults.expect_like(kBufferPrefix + name, saved.tensor(kBufferPrefix + name), buffer);
    const std::string at_start = kStartOfStepPrefix + name;
    at_start_of_step.push_back(saved.contains(at_start) ? saved.tensor(at_start) : at::Tensor());
    if (saved.contains(at_start)) faults.expect_like(at_start, saved.tensor(at_start), buffer);
  }
  faults.throw_if_any("MixedPrecision");
  scaling::ScalerState scaler = scaling::loaded_from(under(saved, kLossScalePrefix));
  if (impl_->on_device) scaler.options.hysteresis = 1;  // the only one there; the CPU may have had another
  const StateDict recipe = under(saved, kRecipePrefix), sum = under(saved, kAccumulationPrefix);
  if (impl_->quant) impl_->quant->check_loadable(recipe);
  if (impl_->accumulator) impl_->accumulator->load(sum, impl_->params);
  if (impl_->quant) impl_->quant->load_state_dict(recipe);
  impl_->scaler = scaler;
  impl_->write_scale();
  for (const Param& param : impl_->updated()) {
    if (!param.master.defined() || (param.is_part() && param.working.numel() == 0)) continue;
    const at::Tensor& master = saved.tensor(saved_name("master." + param.name, param));
    const bool frozen_then = master.numel() == 0 && master.sizes() != param.working.sizes();
    frozen_then ? drop_master(param) : give_master(param);
  }
  for_each_tensor(impl_->updated(), impl_->buffers->buffers(),
                  [&](const std::string& name, at::Tensor tensor) { tensor.copy_(saved.tensor(name)); });
  // Whatever step was under way is not the loaded state's.
  for (const Param& param : impl_->params) param.working.mutable_grad().reset();
  for (const Param& param : impl_->updated()) param.working.mutable_grad().reset();
  if (impl_->shards) impl_->shards->share_update(/*all_changed=*/true);
  impl_->inspected = impl_->backward_ran = false;
  impl_->inspected_there.clear();
  impl_->buffers->restart();
  if (under(saved, kStartOfStepPrefix).size() > 0) impl_->buffers->resume_step(at_start_of_step);
}

}  // namespace halfstep
