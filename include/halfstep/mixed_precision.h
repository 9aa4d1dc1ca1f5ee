// Trains any module in the precision that one line chooses.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/autocast.h>
#include <halfstep/config.h>
#include <halfstep/grads.h>
#include <halfstep/memory.h>
#include <halfstep/params.h>
#include <halfstep/precision.h>
#include <halfstep/ranks.h>
#include <halfstep/state_dict.h>

#include <concepts>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace halfstep {

class StepObserver;  // Halfstep's own: a Probe is one

/// Where the gradients of several micro-batches are summed.
enum class Accumulation {
  None,       ///< in the parameters' own type, by autograd: one micro-batch a step, or FP32 parameters
  Fp32,       ///< in FP32: 4 bytes per parameter for the whole run, beside the gradients of one micro-batch
  Bf16Kahan,  ///< in BF16 with a BF16 compensation: the same 4 bytes, of which the optimizer reads 2
};

/// How gradients become those of all ranks.
struct RankReduction {
  /// In which type they travel: FP32, or BF16 or FP16, half the bytes and a rounding for each rank.
  c10::ScalarType type = at::kFloat;
  /// Above 0, how many micro-batches a step has, on all ranks together: they are added in the order of one
  /// tree, so that a run has the same bits on any number of ranks, one too. For comparing and for finding
  /// faults: each rank gets what all others computed, and keeps a sum for each level of the tree. Divide the
  /// loss by that number.
  int64_t canonical_batches = 0;
};

/// Of what each rank keeps a part instead of all, so that memory shrinks with their number. docs/scale.md has
/// what each costs.
enum class Sharding {
  None,       ///< every rank has all of it
  States,     ///< masters and moments in parts: all weights are gathered after each update
  Gradients,  ///< sums of gradients too: each micro-batch is summed over ranks
  Weights,    ///< the model's weights too: those of one block are gathered while it is used
};

/// In what weights travel to a rank that has a part of them.
enum class Gather {
  Own,  ///< in the type that the model has
  /// Matrices of blocks as E4M3 with a power of two for every 32 elements, half the bytes of BF16. A step's
  /// forward and backward then use weights rounded so; masters, and forward without gradients (evaluation,
  /// taking the model out), do not.
  Fp8,
};

/// What a MixedPrecision does beside the precision itself.
struct MixedPrecisionOptions {
  AutocastOptions autocast{};
  Accumulation accumulation = Accumulation::None;
  /// Install Halfstep's CPU allocator (halfstep/memory.h) for the whole process, if it is not there yet.
  bool cpu_allocator = false;
  /// The processes that train this model together, each on its own batches. All start from rank 0's weights
  /// and buffers; a gradient is the mean over ranks, and all ranks decide alike. Several need FP32 sums: 4
  /// bytes per parameter, as Accumulation::Fp32 does.
  Ranks ranks{};
  RankReduction reduction{};
  /// With several ranks; one process has all of it in any case. mp.params() are then this rank's parts, of
  /// one dimension, for an optimizer of Halfstep's; the model's own tensors are all there with
  /// Sharding::States and Gradients, and inside mp.forward with Weights. The same bits as without, where the
  /// gradients have them.
  Sharding sharding = Sharding::None;
  /// For Sharding::Weights, the parts of the model whose weights come and go together, by name: "layers.*".
  /// Empty: those that are numbered, as "layers.3" or "transformer.h.11".
  std::vector<std::string> blocks{};
  Gather gather = Gather::Own;  ///< for Sharding::Weights
};

/// One of several models, with the name that its parameters begin with.
struct NamedModel {
  std::string name;
  std::reference_wrapper<torch::nn::Module> model;
};

/// A parameter of no module.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// Of the values that a recipe quantised: shares from 0 to 1.
struct QuantisedShares {
  double saturated = 0;                           ///< held at the format's max
  double vanished = 0;                            ///< not zero, and zero as a code
  std::string most_saturated{}, most_vanished{};  ///< the weight of whose layer it is the largest share
};

/// Of one call of MixedPrecision::backward.
struct BackwardOptions {
  bool retain_graph = false;  ///< for another backward through a part of the same graph
  /// With ranks and accumulation: no other backward follows in this step, so that sums may travel while this
  /// one still runs. Without accumulation that is so in any case.
  bool last = false;
};

/// The precision of one model in one training loop.
///
///     halfstep::MixedPrecision mp(halfstep::Precision::bf16(), *model);
///     halfstep::AdamW optimizer(mp.params(), {.lr = 3e-4, .weight_decay = 0.1});
///     for (const auto& batch : batches) {
///       const auto loss = mp.forward([&] { return loss_of(model, batch); });
///       mp.backward(loss);
///       const auto grads = mp.inspect_grads();
///       const auto report = optimizer.step(grads.clipped_to(1.0));
///       mp.advance(grads);
///       optimizer.zero_grad();
///     }
///
/// With a low precision, the constructor rounds the model's FP32 parameters where they are, having kept their
/// full values first; buffers stay as they are. A parameter that the model has under two names is one. One
/// that does not require a gradient has no master: it gets one, from its working copy, when an optimizer
/// first updates it.
///
/// Weights may be changed between steps, and the change wins (see Param). FP32 weights that torch::load,
/// set_data or Module::to put in the place of rounded ones are taken in with all their bits at the next
/// forward. A skipped step changes neither weights nor buffers: the running statistics of a batch norm that
/// saw an overflow are put back by advance, to what they were before the step's first mp.forward (in a loop
/// that opens scopes of its own instead: to what they were after the last advance).
///
/// With accumulation, each backward is one micro-batch: its gradients are checked, added to the sum and
/// dropped. A sum, not a mean: divide the loss by the number of micro-batches. close_sum() ends it;
/// mp.zero_grad() starts it again. One that is not finite is not added: inspect_grads names it and its
/// parameter, and the step is skipped.
///
/// Between steps it remembers masters, buffers and the loss scale: save state_dict() with the optimizer's.
/// With accumulation the sum of a step's first micro-batches is part of it, until close_sum: a run
/// saved between two micro-batches resumes with the next one. From close_sum or inspect_grads to advance, do
/// not save.
///
/// The order of a step is backward, close_sum with accumulation, inspect_grads, optimizer.step, advance.
/// Calls that are missing or in another order are an Error that says which: gradients of a scaled loss that
/// backward did not make, a backward before advance, weights that were updated without their masters.
///
/// The model may be on any device of LibTorch's: move it there first. On an accelerator no call of a step
/// waits for it; whether a step was skipped is known there, and here when somebody asks (GradSummary,
/// loss_scale(), state_dict(), whose tensors are the host's). docs/devices.md.
///
/// One loop, one object; not thread-safe.
class HALFSTEP_API MixedPrecision {
 public:
  MixedPrecision(Precision precision, torch::nn::Module& model, MixedPrecisionOptions options = {});

  /// For torch::nn::Linear and any other holder of a module.
  template <typename Holder>
    requires requires(const Holder& holder) {
      { *holder.ptr() } -> std::convertible_to<torch::nn::Module&>;
    }
  MixedPrecision(Precision precision, const Holder& model, MixedPrecisionOptions options = {})
      : MixedPrecision(std::move(precision), *model.ptr(), options) {}

  /// Several models under one loss scale, as a generator and its critic. Names of parameters begin with that
  /// of their model: "critic.layers.0.weight"; params("critic") are those of one.
  MixedPrecision(Precision precision, const std::vector<NamedModel>& models,
                 MixedPrecisionOptions options = {});
  /// A TorchScript module, as torch::jit::load gives it.
  MixedPrecision(Precision precision, torch::jit::Module& model, MixedPrecisionOptions options = {});
  /// Parameters by themselves. Buffers that forward changes are then the caller's to save, and to put back
  /// after a skipped step.
  MixedPrecision(Precision precision, const std::vector<NamedParameter>& parameters,
                 MixedPrecisionOptions options = {});
  ~MixedPrecision();
  MixedPrecision(MixedPrecision&&) noexcept;
  MixedPrecision& operator=(MixedPrecision&&) noexcept;

  /// Runs `function` in the precision and returns what it returns. For evaluation too.
  template <typename Function>
  auto forward(Function&& function) const {
    const ForwardScope scope(*this);
    return std::forward<Function>(function)();
  }

  /// Scales the loss, if the precision does, and runs backward. Two losses that share a part of the graph:
  /// add them, or ask for Accumulation::Fp32 and keep the graph in the first call.
  void backward(const at::Tensor& loss, BackwardOptions options = {});

  /// Ends the sum of this step's micro-batches, which are the parameters' gradients from here on. With
  /// accumulation once a step, after its last backward; without there is no sum, and nothing to do.
  void close_sum();

  /// One read-only pass: finite? norm? whose?
  [[nodiscard]] GradSummary inspect_grads(GradDetail detail = GradDetail::Total) const;

  /// Drops all gradients, and with accumulation the sum of this step's micro-batches, which the optimizer's
  /// and the model's zero_grad know nothing of: the step starts again.
  void zero_grad();

  /// Updates the loss scale, and puts buffers back if the step was skipped; once a step, after the optimizer.
  /// Throws SkipLimitError when too many steps in a row were skipped: LossScaling::max_consecutive_skips, 100
  /// without loss scaling.
  void advance(const GradSummary& grads);

  /// All parameters, with what is kept beside them: what an optimizer takes. With sharding, this rank's parts
  /// of them (Param::is_part).
  const std::vector<Param>& params() const;
  /// Those of one model, or of one part of it: whose names begin with `prefix` and a dot.
  std::vector<Param> params(std::string_view prefix) const;
  /// The one that was given.
  const Precision& precision() const;
  const Ranks& ranks() const;              ///< those that were given
  const RankReduction& reduction() const;  ///< too
  Accumulation accumulation() const;       ///< too
  /// The one that was asked for; None in one process.
  Sharding sharding() const;
  /// What the recipe does with each weight of two dimensions; nothing without a recipe.
  const std::vector<LayerPlan>& layers() const;
  /// What the recipe of another precision would do with them.
  std::vector<LayerPlan> layers_under(const Precision& precision) const;
  /// How often the recipe computed a product of this weight in training. 0 for a weight that `layers()` calls
  /// quantised: the model uses it in another way than by linear, addmm, matmul or mm.
  std::int64_t quantised_uses(std::string_view weight) const;
  /// Since the last call; nothing where nothing was quantised in a forward that was trained, or in a
  /// backward.
  std::optional<QuantisedShares> take_quantised_shares();
  /// Who looks at the tensors of each step, as long as it lives; a Probe gives itself.
  void set_observer(std::weak_ptr<StepObserver> observer);
  /// Whether this machine computes in the precision or only imitates it, slower than FP32, and why. FP16 is
  /// emulated on most CPUs.
  const PrecisionSupport& support() const;
  double loss_scale() const;  ///< 1 without loss scaling
  /// Clean and skipped steps are counted without loss scaling too.
  const LossScaleState& loss_scale_state() const;
  /// How the scale moves from here on: after load_state_dict, which brings the saved rules along. The present
  /// scale stays, but for a floor above it or a cap below. Between steps: where gradients of this step carry
  /// the scale already, changing it is an Error.
  void set_loss_scaling(const LossScaling& options);

  /// Weights with all their bits, buffers, and the loss scale. Loading refuses what does not fit, all at
  /// once.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& saved);

  /// Writes a trained model for programs without Halfstep, which read it into a module that they made with
  /// the same constructor: torch::load(model, "model.pt").
  ///
  ///     mp.save_weights("model.pt", model);
  ///
  /// `model` is written by its own save(): all of what was given to the constructor, one of several models,
  /// or a part. at::kFloat has every weight with all its bits; one that was never trained in this object has
  /// those of its working copy. at::kBFloat16 has the weights that forward uses, and rounds floating-point
  /// buffers: the module that reads it needs BF16 tensors first (docs/guide.md). Integer buffers stay as they
  /// are, all tensors are the CPU's, and other types are an Error.
  ///
  /// Between steps: from backward to advance it is an Error. A file that was there stays until the new one is
  /// durable. While it writes, the model's tensors hold what is written.
  void save_weights(const std::filesystem::path& path, torch::nn::Module& model,
                    c10::ScalarType type = at::kFloat) const;
  /// For torch::nn::Linear and any other holder of a module.
  template <typename Holder>
    requires requires(const Holder& holder) {
      { *holder.ptr() } -> std::convertible_to<torch::nn::Module&>;
    }
  void save_weights(const std::filesystem::path& path, const Holder& model,
                    c10::ScalarType type = at::kFloat) const {
    save_weights(path, *model.ptr(), type);
  }
  /// A TorchScript module with its code, for torch::jit::load("model.pt") in C++ or Python.
  void save_weights(const std::filesystem::path& path, torch::jit::Module& model,
                    c10::ScalarType type = at::kFloat) const;

 private:
  class HALFSTEP_API ForwardScope {
   public:
    explicit ForwardScope(const MixedPrecision& mp);
    ~ForwardScope();
    ForwardScope(const ForwardScope&) = delete;
    ForwardScope& operator=(const ForwardScope&) = delete;

   private:
    MemoryClassScope memory_;
    std::shared_ptr<void> shards_;  // with sharding: weights are there when they are used
    std::shared_ptr<void> observed_;
    std::optional<AutocastScope> autocast_;
  };

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep
