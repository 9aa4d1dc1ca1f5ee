// What a run learns: a model of anybody's, and the data for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/state_dict.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace halfstep {

/// Of held-out data.
struct Score {
  double loss = 0.0;
  std::optional<double> accuracy{};
  int64_t count = 0;  ///< tokens, images or what else it is the mean of
};

/// A model, its loss and its batches, for a Trainer to train. Four functions and a state are asked for; the
/// rest has defaults. examples/07_own_model.cpp is one.
///
/// A resumed run has the bits of one that was never stopped if state_dict() holds all that decides which
/// batch comes next. LibTorch's default generators are saved by the trainer.
class HALFSTEP_API Task {
 public:
  virtual ~Task();

  /// What is trained: the same module in every call.
  virtual torch::nn::Module& model() = 0;

  /// Moves on to the next batch. Called once for each loss.
  virtual void take_batch() = 0;
  /// Mean loss of the batch that was taken. Called in the run's precision.
  virtual at::Tensor loss() = 0;
  /// Loss on held-out data; asked for only where train.evaluate_every is set. Forward belongs into
  /// precision.forward; EvaluationScope (halfstep/models.h) turns dropout off.
  virtual Score evaluate(const MixedPrecision& precision) = 0;

  /// Where the data stands, and what the model remembers beside its parameters and buffers.
  virtual StateDict state_dict() const = 0;
  virtual void load_state_dict(const StateDict& saved) = 0;
  /// Takes from `later`, a state of this task, where the data stands, and nothing else: called when a run has
  /// gone back to an earlier checkpoint and leaves the batches between out. By default it loads all of
  /// `later`: right for a task that remembers nothing else.
  virtual void move_data_to(const StateDict& later) { load_state_dict(later); }

  /// What differs from a saved state and does not keep it from being loaded, each in a sentence: noted where
  /// a run resumes. By default nothing.
  virtual std::vector<std::string> changes_since(const StateDict& saved) const;

  virtual std::string model_text() const;  ///< for the screen; "own model"
  virtual std::string data_text() const;   ///< for the screen; "own data"
  virtual std::string unit() const;        ///< what a batch is counted in; "samples"
  virtual int64_t items_per_batch() const { return 1; }
  /// Multiplications and additions of forward and backward of one batch, if they can be counted.
  virtual std::optional<double> flops_per_batch() const { return std::nullopt; }

  /// What the model was given, and what it wrote.
  struct Sample {
    std::string prompt, text;
  };
  /// Something that the model writes, for train.sample_every; nothing where it writes no text.
  virtual std::optional<Sample> sample(const MixedPrecision& precision, uint64_t seed);

  /// The trained model for others, into a folder; by default all its parameters and buffers as
  /// model.safetensors.
  virtual void write_model(const std::filesystem::path& folder);
};

}  // namespace halfstep
