// What a run learns: a model, and the data for it.
#pragma once

#include <halfstep/mixed_precision.h>
#include <halfstep/run_config.h>
#include <torch/nn/module.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace halfstep::train {

/// Of the held-out data.
struct Score {
  double loss = 0.0;
  std::optional<double> accuracy{};
  int64_t count = 0;  ///< tokens or images that it is the mean of
};

class Task {
 public:
  virtual ~Task() = default;

  virtual torch::nn::Module& model() = 0;
  virtual std::string model_text() const = 0;
  virtual std::string data_text() const = 0;
  virtual std::string unit() const = 0;  ///< "tokens"
  virtual int64_t units_a_batch() const = 0;
  /// Multiplications and additions of forward and backward of one batch, if they can be counted.
  virtual std::optional<double> flops_a_batch() const = 0;

  virtual void take_batch() = 0;
  /// Mean loss of the batch that was taken.
  virtual at::Tensor loss() = 0;

  virtual Score evaluate(const MixedPrecision& precision) = 0;

  struct Sample {
    std::string prompt, text;
  };
  /// Nothing where the model writes no text.
  virtual std::optional<Sample> sample(const MixedPrecision& precision, uint64_t seed) = 0;

  /// Where the data stands, and what the model remembers beside its parameters.
  virtual StateDict state_dict() const = 0;
  virtual void load_state_dict(const StateDict& saved) = 0;

  /// The trained model for others: a Hugging Face folder, or one safetensors file.
  virtual void write_model(const std::filesystem::path& folder) const = 0;
};

/// `tokens_folder`: where token files made of text are put. `most_text_bytes`: see TokenOptions.
std::unique_ptr<Task> text_task(const RunConfig& config, const std::filesystem::path& tokens_folder,
                                int64_t most_text_bytes);
std::unique_ptr<Task> image_task(const RunConfig& config);

}  // namespace halfstep::train
