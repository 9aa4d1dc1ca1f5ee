#include "models/layers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <halfstep/error.h>
#include <halfstep/functions.h>

#include <utility>

#include "words/names.h"

namespace halfstep::models {

at::Tensor uninitialized_parameter(torch::nn::Module& owner, const std::string& name, at::IntArrayRef sizes,
                                   Uninitialized uninitialized) {
  return owner.register_parameter(
      name, at::empty(sizes, at::TensorOptions(uninitialized.type).device(uninitialized.device)));
}

Linear::Linear(int64_t inputs, int64_t outputs, bool with_bias, Uninitialized uninitialized)
    : weight(uninitialized_parameter(*this, "weight", {outputs, inputs}, uninitialized)) {
  if (with_bias) bias = uninitialized_parameter(*this, "bias", {outputs}, uninitialized);
}

at::Tensor Linear::operator()(const at::Tensor& x) const { return at::linear(x, weight, bias); }

Conv1D::Conv1D(int64_t inputs, int64_t outputs, Uninitialized uninitialized)
    : weight(uninitialized_parameter(*this, "weight", {inputs, outputs}, uninitialized)),
      bias(uninitialized_parameter(*this, "bias", {outputs}, uninitialized)) {}

at::Tensor Conv1D::operator()(const at::Tensor& x) const {
  return at::addmm(bias, x.flatten(0, 1), weight).view({x.size(0), x.size(1), weight.size(1)});
}

Embedding::Embedding(int64_t entries, int64_t width, Uninitialized uninitialized, int64_t padding_id)
    : padding_id(padding_id),
      weight(uninitialized_parameter(*this, "weight", {entries, width}, uninitialized)) {}

at::Tensor Embedding::operator()(const at::Tensor& ids) const {
  return at::embedding(weight, ids, padding_id);
}

LayerNorm::LayerNorm(int64_t width, double epsilon, Uninitialized uninitialized)
    : epsilon(epsilon),
      weight(uninitialized_parameter(*this, "weight", {width}, uninitialized)),
      bias(uninitialized_parameter(*this, "bias", {width}, uninitialized)) {}

at::Tensor LayerNorm::operator()(const at::Tensor& x) const {
  return halfstep::layer_norm(x, weight, bias, epsilon);
}

RmsNorm::RmsNorm(int64_t width, double epsilon, Uninitialized uninitialized)
    : epsilon(epsilon), weight(uninitialized_parameter(*this, "weight", {width}, uninitialized)) {}

at::Tensor RmsNorm::operator()(const at::Tensor& x) const { return halfstep::rms_norm(x, weight, epsilon); }

Activation activation_named(const std::string& name, const char* field) {
  const Activation gelu_tanh = [](const at::Tensor& x) { return at::gelu(x, "tanh"); };
  const std::pair<const char*, Activation> known[] = {
      {"silu", [](const at::Tensor& x) { return at::silu(x); }},
      {"swish", [](const at::Tensor& x) { return at::silu(x); }},
      {"relu", [](const at::Tensor& x) { return at::relu(x); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      // Three spellings of one formula.
      {"gelu_new", gelu_tanh},
      {"gelu_fast", gelu_tanh},
      {"gelu_pytorch_tanh", gelu_tanh},
  };
  std::string names;
  for (const auto& [known_name, function] : known) {
    if (known_name == name) return function;
    names += (names.empty() ? "" : ", ") + std::string(known_name);
  }
  throw Error(detail::concat(field, ": ", in_quotes(name), " is not implemented; these are: ", names, "."));
}

bool is_silu(const std::string& name) { return name == "silu" || name == "swish"; }

void draw_initial_values(torch::nn::Module& model, uint64_t seed, double deviation, double of_residual) {
  const at::NoGradGuard no_grad;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    at::Tensor& parameter = item.value();
    if (name.ends_with("bias")) {
      parameter.zero_();
    } else if (parameter.dim() == 1) {
      parameter.fill_(1);
    } else {
      parameter.normal_(0, name.ends_with(".c_proj.weight") ? of_residual : deviation, generator);
    }
  }
}

}  // namespace halfstep::models
