// A model that is asked, not trained.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <utility>
#include <vector>

namespace halfstep {

/// No dropout and no autograd until the end of the block. Then each submodule has its own mode again, which
/// need not be that of the whole: a frozen part of a model that trains is often in evaluation.
class EvaluationScope {
 public:
  explicit EvaluationScope(torch::nn::Module& model) : modes_{{&model, model.is_training()}} {
    for (const auto& module : model.modules(/*include_self=*/false)) {
      modes_.emplace_back(module.get(), module->is_training());
    }
    model.eval();
  }
  /// `train` speaks for all that a module holds; modules() lists a holder before what it holds.
  ~EvaluationScope() {
    for (const auto& [module, was_training] : modes_) module->train(was_training);
  }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  at::NoGradGuard no_grad_;
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
};

}  // namespace halfstep
