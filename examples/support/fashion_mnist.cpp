#include "fashion_mnist.h"

#include <halfstep/data.h>

#include <filesystem>
#include <stdexcept>

namespace {

const std::string kFolder = "/usr/share/datasets/fashion-mnist/";
constexpr double kMean = 0.2860, kDeviation = 0.3530;  // of the training pixels, scaled to 0..1

torch::Tensor read(const std::string& file) {
  if (!std::filesystem::exists(kFolder + file))
    throw std::runtime_error(kFolder + file +
                             ": not found. Install it with: apt-get install dataset-fashion-mnist");
  return halfstep::read_idx(kFolder + file);
}

}  // namespace

Images load_fashion_mnist(const std::string& name) {
  const auto pixels = read(name + "-images-idx3-ubyte.gz").flatten(1).to(torch::kFloat).div_(255);
  return {(pixels - kMean) / kDeviation, read(name + "-labels-idx1-ubyte.gz").to(torch::kInt64)};
}

double accuracy(torch::nn::Sequential& model, const Images& images) {
  const torch::NoGradGuard no_grad;
  return model->forward(images.pixels).argmax(1).eq(images.labels).to(torch::kDouble).mean().item<double>();
}
