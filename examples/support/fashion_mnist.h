// Fashion-MNIST from Debian's package dataset-fashion-mnist: 28 x 28 grey images of ten kinds of clothing.
#pragma once

#include <torch/torch.h>

struct Images {
  torch::Tensor pixels;  // [count, 784], FP32, zero mean and unit variance over the training set
  torch::Tensor labels;  // [count], int64
};

/// `name` is "train" (60,000 images) or "t10k" (10,000). Throws with the package to install if it is missing.
Images load_fashion_mnist(const std::string& name);

/// Share of images whose largest output is the right one.
double accuracy(torch::nn::Sequential& model, const Images& images);
