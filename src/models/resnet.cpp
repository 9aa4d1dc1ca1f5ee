// ResNet-18. Members that are registered carry torchvision's names.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>

#include "models/layers.h"

namespace halfstep {
namespace {

/// Without a bias: the batch norm behind it has one. Padded so that stride alone decides the size.
struct Convolution : torch::nn::Module {
  Convolution(int64_t inputs, int64_t outputs, int64_t side, int64_t stride)
      : stride(stride),
        weight(models::uninitialized_parameter(*this, "weight", {outputs, inputs, side, side}, {})) {}

  at::Tensor operator()(const at::Tensor& x) const {
    const int64_t padding = weight.size(2) / 2;
    return at::conv2d(x, weight, /*bias=*/{}, {stride, stride}, {padding, padding});
  }

  int64_t stride;
  at::Tensor weight;
};

struct BatchNorm : torch::nn::Module {
  explicit BatchNorm(int64_t channels)
      : weight(register_parameter("weight", at::ones({channels}))),
        bias(register_parameter("bias", at::zeros({channels}))),
        running_mean(register_buffer("running_mean", at::zeros({channels}))),
        running_var(register_buffer("running_var", at::ones({channels}))),
        num_batches_tracked(register_buffer("num_batches_tracked", at::zeros({}, at::kLong))) {}

  at::Tensor operator()(const at::Tensor& x) {
    if (is_training()) num_batches_tracked += 1;
    return at::batch_norm(x, weight, bias, running_mean, running_var, is_training(), /*momentum=*/0.1,
                          /*eps=*/1e-5, /*cudnn_enabled=*/true);
  }

  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
};

/// Brings what goes around a block to the block's output shape.
struct Downsample : torch::nn::Module {
  Downsample(int64_t inputs, int64_t outputs, int64_t stride)
      : conv(register_module("0", std::make_shared<Convolution>(inputs, outputs, 1, stride))),
        norm(register_module("1", std::make_shared<BatchNorm>(outputs))) {}

  std::shared_ptr<Convolution> conv;
  std::shared_ptr<BatchNorm> norm;
};

struct BasicBlock : torch::nn::Module {
  BasicBlock(int64_t inputs, int64_t outputs, int64_t stride)
      : conv1(register_module("conv1", std::make_shared<Convolution>(inputs, outputs, 3, stride))),
        bn1(register_module("bn1", std::make_shared<BatchNorm>(outputs))),
        conv2(register_module("conv2", std::make_shared<Convolution>(outputs, outputs, 3, 1))),
        bn2(register_module("bn2", std::make_shared<BatchNorm>(outputs))) {
    if (stride != 1 || inputs != outputs)
      downsample = register_module("downsample", std::make_shared<Downsample>(inputs, outputs, stride));
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor around = downsample ? (*downsample->norm)((*downsample->conv)(x)) : x;
    const at::Tensor inner = at::relu((*bn1)((*conv1)(x)));
    return at::relu((*bn2)((*conv2)(inner)) + around);
  }

  std::shared_ptr<Convolution> conv1;
  std::shared_ptr<BatchNorm> bn1;
  std::shared_ptr<Convolution> conv2;
  std::shared_ptr<BatchNorm> bn2;
  std::shared_ptr<Downsample> downsample;
};

/// torchvision's: convolutions normal with variance 2 / (outputs * side^2), the last layer uniform as
/// torch::nn::Linear's. Batch norms have theirs.
void draw_initial_values(torch::nn::Module& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& item : model.named_parameters()) {
    at::Tensor& parameter = item.value();
    if (parameter.dim() == 4) {
      const int64_t outgoing = parameter.size(0) * parameter.size(2) * parameter.size(3);
      parameter.normal_(0, std::sqrt(2.0 / static_cast<double>(outgoing)), generator);
    } else if (item.key().starts_with("fc.")) {
      const double bound = 1 / std::sqrt(512.0);
      parameter.uniform_(-bound, bound, generator);
    }
  }
}

}  // namespace

struct ResNet18Impl::Layers {
  std::shared_ptr<Convolution> conv1;
  std::shared_ptr<BatchNorm> bn1;
  std::vector<std::shared_ptr<BasicBlock>> blocks;
  std::shared_ptr<models::Linear> fc;
};

ResNet18Impl::ResNet18Impl(ResNet18Options options, uint64_t seed)
    : small_images_(options.small_images), layers_(std::make_shared<Layers>()) {
  HALFSTEP_CHECK(options.classes > 0 && options.channels > 0, "ResNet18: ", options.classes, " classes and ",
                 options.channels, " channels; both must be positive.");
  const int64_t side = small_images_ ? 3 : 7, stride = small_images_ ? 1 : 2;
  layers_->conv1 =
      register_module("conv1", std::make_shared<Convolution>(options.channels, 64, side, stride));
  layers_->bn1 = register_module("bn1", std::make_shared<BatchNorm>(64));
  int64_t inputs = 64;
  for (int stage = 1; stage <= 4; ++stage) {
    const int64_t outputs = int64_t{32} << stage;
    torch::nn::ModuleList blocks;
    for (int i = 0; i < 2; ++i) {
      layers_->blocks.push_back(std::make_shared<BasicBlock>(inputs, outputs, i == 0 && stage > 1 ? 2 : 1));
      blocks->push_back(layers_->blocks.back());
      inputs = outputs;
    }
    register_module("layer" + std::to_string(stage), blocks);
  }
  layers_->fc = register_module(
      "fc", std::make_shared<models::Linear>(512, options.classes, /*with_bias=*/true, Uninitialized{}));
  draw_initial_values(*this, seed);
}

at::Tensor ResNet18Impl::forward(const at::Tensor& images) {
  at::Tensor x = at::relu((*layers_->bn1)((*layers_->conv1)(images)));
  if (!small_images_) x = at::max_pool2d(x, {3, 3}, {2, 2}, {1, 1});
  for (const auto& block : layers_->blocks) x = block->forward(x);
  return (*layers_->fc)(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
}

}  // namespace halfstep
