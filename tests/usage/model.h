// The model of a program, in plain LibTorch: the same class is trained through Halfstep and by the oracle.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "usage/program.h"

namespace usage {

struct Batch {
  at::Tensor input;    ///< [batch, length, width] real numbers, or [batch, length] token ids
  at::Tensor target;   ///< class ids, or real numbers
  uint64_t mask_seed;  ///< of the dropout whose masks both sides draw
};

/// The batch of a step and micro-batch: always the same numbers.
Batch batch_of(const Program& program, int step, int micro_batch);

/// One layer that keeps the shape [batch, length, width].
class LayerModule : public torch::nn::Module {
 public:
  LayerModule(const Program& program, const Layer& layer);
  at::Tensor forward(const at::Tensor& x);

  const Layer layer;
  /// Of Dropout: where its mask comes from, set before each forward.
  uint64_t mask_seed = 0;
  /// Of EngineDropout: the factors (0 or 1/(1-p)) of the last forward, or those to use if `replay`.
  at::Tensor mask;
  std::optional<bool> has_zeros_seen{};  ///< in the first forward, by an engine's dropout
  bool replay = false;
  /// Of Attention: what becomes of a result between two of its operations. The oracle perturbs it there,
  /// where the program rounds it; unset it stays as it is.
  std::function<at::Tensor(const at::Tensor&)> between{};
  /// Of Linear: what computes it of input, weight and bias; unset it is LibTorch.
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)> linear{};

 private:
  void build(int width);
  at::Tensor run(const at::Tensor& x);

  torch::nn::AnyModule module_;
  torch::nn::LSTM lstm_{nullptr};
  torch::nn::GRU gru_{nullptr};
  torch::nn::LSTMCell lstm_cell_{nullptr};
  torch::nn::GRUCell gru_cell_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr};
  torch::nn::MultiheadAttention attention_{nullptr};
  at::Tensor rms_weight_;
};

class Model : public torch::nn::Module {
 public:
  /// FP32, initialized from the program's seed.
  explicit Model(const Program& program);

  /// Before each forward: masks are those of this batch, and of this forward.
  void begin(const Batch& batch);

  at::Tensor embed(const Batch& batch);
  at::Tensor layer(int index, const at::Tensor& x);
  at::Tensor head(const at::Tensor& x);
  /// `upcast`: the logits to FP32 first, for a loss outside any autocast scope.
  at::Tensor loss(const at::Tensor& logits, const Batch& batch, bool upcast);

  /// Masks that EngineDropout drew in the first forward since `begin`, by layer.
  std::map<int, at::Tensor> masks() const;
  void replay_masks(const std::map<int, at::Tensor>& masks);

  const Program program;
  std::vector<std::shared_ptr<LayerModule>> layers;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear output{nullptr};
};

/// Parameters by name; one that has two names once, by the first.
std::vector<std::pair<std::string, at::Tensor>> unique_parameters(const torch::nn::Module& model);
std::vector<std::pair<std::string, at::Tensor>> unique_buffers(const torch::nn::Module& model);

inline constexpr double kDropout = 0.25;
inline constexpr double kMaxNorm = 1.0;
inline constexpr int kVocabulary = 12;

}  // namespace usage
