// A small network learns Fashion-MNIST in FP32, with LibTorch alone. Promise: test accuracy >= 0.84
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
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int epoch = 1; epoch <= 2; ++epoch) {
    for (const auto& batch : torch::randperm(60000).split(128)) {
      optimizer.zero_grad();
      const auto loss = loss_of(model, train, batch);
      loss.backward();
      optimizer.step();
    }
    std::printf("epoch %d: test accuracy %.4f\n", epoch, accuracy(model, test));
  }
}
