// An ordinary model and batches for it. Knows LibTorch alone: the program that trains it and the one that
// uses it afterwards both include this.
#pragma once

#include <torch/torch.h>

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl()
      : body(register_module("body", torch::nn::Linear(20, 64))),
        norm(register_module("norm", torch::nn::BatchNorm1d(64))),
        head(register_module("head", torch::nn::Linear(64, 10))) {}
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::gelu(norm(body(x)))); }

  torch::nn::Linear body;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Classifier);

/// Which of the first ten of twenty numbers is the largest?
struct Batch {
  torch::Tensor x, target;
};
inline Batch next_batch(int64_t size = 64) {
  const auto x = torch::randn({size, 20});
  return {x, x.slice(1, 0, 10).argmax(1)};
}

inline torch::Tensor loss_of(Classifier& model, const Batch& batch) {
  return torch::cross_entropy_loss(model->forward(batch.x), batch.target);
}
