// A model that is asked, not trained.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace halfstep {

/// No dropout and no autograd until the end of the block.
class EvaluationScope {
 public:
  explicit EvaluationScope(torch::nn::Module& model) : model_(model), was_training_(model.is_training()) {
    model_.eval();
  }
  ~EvaluationScope() { model_.train(was_training_); }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  at::NoGradGuard no_grad_;
  torch::nn::Module& model_;
  bool was_training_;
};

}  // namespace halfstep
