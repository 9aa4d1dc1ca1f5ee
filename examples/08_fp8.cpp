// The same with FP8 matrix products: one line of 02_bf16.cpp changed. Promise: test accuracy >= 0.84
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "support/fashion_mnist.h"

torch::Tensor loss_of(torch::nn::Sequential& model, const Images& images, const torch::Tensor& batch) {
  const auto output = model->forward(images.pixels.index_select(0, batch));
  return torch::cross_entropy_loss(output, images.labels.index_select(0, batch));
}

int main() {
  torch::manual_seed(1);
  const auto train = load_fashion_mnist("train"), test = load_fashion_mnist("t10k");
  torch::nn::Sequential model(torch::nn::Linear(784, 256), torch::nn::ReLU(), torch::nn::Linear(256, 256),
                              torch::nn::ReLU(), torch::nn::Linear(256, 10));
  halfstep::TrainStep step(halfstep::Precision::fp8_delayed(), model, halfstep::AdamWOptions{.lr = 1e-3});
  for (int epoch = 1; epoch <= 2; ++epoch) {
    for (const auto& batch : torch::randperm(60000).split(128)) {
      const auto report = step([&] { return loss_of(model, train, batch); });
      if (!report.stepped()) std::puts(report.sentence().c_str());
    }
    std::printf("epoch %d: test accuracy %.4f\n", epoch, step.forward([&] { return accuracy(model, test); }));
  }
}
