// The program that uses what was trained: LibTorch alone, no Halfstep. plain_program MODEL INPUT OUTPUT
#include <torch/torch.h>

#include <string>

#include "guide/classifier.h"

/// Before torch::load of a file that was saved with at::kBFloat16.
void round_to_bf16(torch::nn::Module& model) {
  for (auto tensor : model.parameters()) tensor.set_data(tensor.to(torch::kBFloat16));
  for (auto tensor : model.buffers())
    if (tensor.is_floating_point()) tensor.set_data(tensor.to(torch::kBFloat16));
}

torch::Tensor logits_of(Classifier& model, const torch::Tensor& x) {
  const torch::NoGradGuard no_grad;
  model->eval();
  return model->forward(x.to(model->head->weight.scalar_type()));
}

int main(int, char** argv) {
  Classifier model;
  if (std::string(argv[1]).ends_with("-bf16.pt")) round_to_bf16(*model);
  torch::load(model, argv[1]);

  torch::Tensor x;
  torch::load(x, argv[2]);
  torch::save(logits_of(model, x), argv[3]);
}
