// What a program should compute: plain LibTorch in FP64, and optimizers written out by hand. Shares no line
// with Halfstep and includes none of its headers.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "usage/model.h"
#include "usage/quant_oracle.h"

namespace usage {

/// What a run holds at one moment, in the order of unique_parameters and unique_buffers.
struct Snapshot {
  std::vector<at::Tensor> full;     ///< weights as exactly as they are kept, FP32
  std::vector<at::Tensor> working;  ///< as the model computes with them, widened to FP32
  std::vector<bool> trained;        ///< requires_grad
  std::vector<at::Tensor> buffers;
};

/// One micro-batch as the program ran it.
struct MicroBatch {
  Batch batch;
  std::map<int, at::Tensor> masks;  ///< of EngineDropout
  double loss_factor = 1;
};

/// The largest relative error of one rounding to the compute type: half a unit in the last place.
double rounding_unit(Compute compute);

/// The same of a saved activation that a region keeps in fewer bits; 0 for regions that keep it as it is.
double compression_unit(RegionKind kind);

struct Expected {
  std::vector<at::Tensor> grads;    ///< FP64, un-scaled, summed over the micro-batches; undefined without one
  std::vector<double> sensitivity;  ///< norm of the change of each gradient under perturbation; see gradients
  std::vector<double> compression;  ///< the same for perturbed saved activations
  /// Of FP32 programs, at a second look: how far LibTorch's own FP32 is from FP64, by parameter and buffer.
  std::vector<double> engine_error, buffer_engine_error;
  std::vector<double> magnitude;  ///< sum of the norms of the micro-batches' gradients
  bool finite = true;
  double largest = 0;             ///< magnitude of any gradient, of layer outputs too
  double largest_activation = 0;  ///< magnitude of any layer's output
  /// Of norms whose saved input is compressed: the error of the input in units of its deviation, at most.
  double norm_error = 0;
  /// Buffers after the step, by how often each forward was run: [buffer][runs - 1].
  std::vector<std::vector<at::Tensor>> buffers;
  std::vector<double> buffer_sensitivity;
  std::vector<at::Tensor> weights;  ///< after forward: max_norm changes them
};

class GradientOracle {
 public:
  explicit GradientOracle(const Program& program);

  /// Loss and gradients of the micro-batches, from these weights and buffers.
  ///
  /// Sensitivity: the same again with every weight, every layer's output and every gradient that leaves a
  /// layer multiplied by 1 + e, with e uniform in [-u, u], element by element, u the rounding unit of the
  /// compute type: what roundings at these places do to the result, to first order and with the same
  /// statistics. The largest of so many new samples and of all before. With more than one, a program in FP32
  /// is also run by LibTorch alone in FP32: its kernels round inside, in ways that no perturbation repeats.
  Expected gradients(const Snapshot& present, const std::vector<MicroBatch>& micro_batches, int samples);

  struct Logits {
    at::Tensor values;
    double sensitivity = 0;
    double engine_error = 0;
    double largest_activation = 0;  ///< as in Expected
  };
  /// Evaluation of one batch.
  Logits evaluate(const Snapshot& present, const Batch& batch, int samples);

  void end_step(bool skipped) { quant_.end_step(skipped); }

 private:
  void load(const Snapshot& present);
  void compute_in(at::ScalarType type);
  at::Tensor forward(const Batch& batch, bool perturbed, bool compressed);
  at::Tensor perturb(const at::Tensor& x, bool perturbed);
  void note_norm_error(int layer, const at::Tensor& x);

  Program program_;
  Model model_;
  std::vector<std::pair<std::string, at::Tensor>> parameters_, buffers_;
  at::ScalarType type_ = at::kDouble;
  at::Generator random_;
  QuantOracle quant_;
  double unit_;
  double largest_ = 0;
  double largest_activation_ = 0;
  double norm_error_ = 0;
  /// The largest so far; the first two in proportion to the gradient.
  std::vector<double> sensitivity_, compression_, buffer_sensitivity_;
};

/// The weights that an optimizer should arrive at, and how far off a storage may be.
class UpdateOracle {
 public:
  UpdateOracle(const Program& program, size_t parameter_count);

  /// The weight is now this one, as after the start or a user's edit.
  void adopt(size_t parameter, const at::Tensor& full);
  void adopt_all(const Snapshot& present) {
    for (size_t i = 0; i < present.full.size(); ++i) adopt(i, present.full[i]);
  }

  /// One step; undefined gradients are of parameters that are left alone. `multiplier` un-scales and clips.
  void step(const std::vector<at::Tensor>& grads, double multiplier);

  struct State {
    at::Tensor weight, bound;       ///< bound: of |weight that is kept - weight|, element by element
    at::Tensor first, first_bound;  ///< moments, and how far the kept ones may be off
    at::Tensor second, second_bound;
    at::Tensor last_update;
    int64_t steps = 0;
  };
  const std::vector<State>& states() const { return states_; }

 private:
  void adamw(State& state, const at::Tensor& grad, double lr);
  void sgd(State& state, const at::Tensor& grad, double lr);
  void store(State& state, const at::Tensor& next, const at::Tensor& error);

  Program program_;
  std::vector<State> states_;
};

/// lr of parameter `index`: the first half of the parameters has the full one, with two groups.
double learning_rate(const Program& program, size_t index, size_t parameter_count);
double weight_decay(const Program& program);

inline constexpr double kClip = 0.05;

/// The rule of the loss scale, by hand.
struct ScaleRule {
  double scale;
  int64_t growth_interval;
  bool scaled;
  int64_t clean = 0;
  void advance(bool finite);
};

}  // namespace usage
