// The layers that the models are made of. Unlike torch::nn's they are made without values: a model's come
// from a file, or are drawn from its seed, and drawing 135 million of them first to throw them away takes
// seconds.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <halfstep/models.h>
#include <torch/nn/module.h>

#include <string>

namespace halfstep::models {

at::Tensor uninitialized_parameter(torch::nn::Module& owner, const std::string& name, at::IntArrayRef sizes,
                                   Uninitialized uninitialized);

/// x W^T + b; weight [outputs, inputs].
struct Linear : torch::nn::Module {
  Linear(int64_t inputs, int64_t outputs, bool with_bias, Uninitialized uninitialized);
  at::Tensor operator()(const at::Tensor& x) const;

  at::Tensor weight, bias;
};

/// x W + b; weight [inputs, outputs]: how GPT-2's files hold it.
struct Conv1D : torch::nn::Module {
  Conv1D(int64_t inputs, int64_t outputs, Uninitialized uninitialized);
  at::Tensor operator()(const at::Tensor& x) const;

  at::Tensor weight, bias;
};

struct Embedding : torch::nn::Module {
  static constexpr int64_t kNoPadding = -1;

  /// The row of `padding_id` gets no gradient from here.
  Embedding(int64_t entries, int64_t width, Uninitialized uninitialized, int64_t padding_id = kNoPadding);
  at::Tensor operator()(const at::Tensor& ids) const;

  int64_t padding_id;
  at::Tensor weight;
};

struct LayerNorm : torch::nn::Module {
  LayerNorm(int64_t width, double epsilon, Uninitialized uninitialized);
  at::Tensor operator()(const at::Tensor& x) const;

  double epsilon;
  at::Tensor weight, bias;
};

/// x / sqrt(mean(x^2) + epsilon), times a weight. The mean is taken in FP32, of BF16 and FP16 too.
struct RmsNorm : torch::nn::Module {
  RmsNorm(int64_t width, double epsilon, Uninitialized uninitialized);
  at::Tensor operator()(const at::Tensor& x) const;

  double epsilon;
  at::Tensor weight;
};

using Activation = at::Tensor (*)(const at::Tensor&);

/// By Hugging Face's name; an Error that names those there are. `field` begins it: "hidden_act".
Activation activation_named(const std::string& name, const char* field);

/// Whether the name is one of SiLU's.
bool is_silu(const std::string& name);

/// What language models start from, from one generator: biases 0, weights of norms 1, all others normal with
/// this deviation. `of_residual` is for matrices whose products are added to the residual stream: c_proj's.
void draw_initial_values(torch::nn::Module& model, uint64_t seed, double deviation, double of_residual);

}  // namespace halfstep::models
