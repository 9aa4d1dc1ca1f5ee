// A step from its pieces: four micro-batches, clipped, in BF16. Promise: test accuracy >= 0.84
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
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model,
                              {.accumulation = halfstep::Accumulation::Fp32});
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-3});
  for (int epoch = 1; epoch <= 2; ++epoch) {
    for (const auto& batch : torch::randperm(60000).split(128)) {
      for (const auto& micro_batch : batch.chunk(4))
        mp.backward(mp.forward([&] { return loss_of(model, train, micro_batch) / 4; }));
      mp.close_sum();                         // their gradients are one from here on
      const auto grads = mp.inspect_grads();  // finite? norm? whose?
      const auto report = optimizer.step(grads.clipped_to(1.0));
      if (!report.stepped()) std::puts(report.sentence().c_str());
      mp.advance(grads);  // the loss scale, if there is one
      optimizer.zero_grad();
    }
    std::printf("epoch %d: test accuracy %.4f\n", epoch, mp.forward([&] { return accuracy(model, test); }));
  }
}
