#include "train/contents.h"

#include <halfstep/error.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <unordered_set>

namespace halfstep::train {
namespace {

/// Sparse, expanded and inference tensors cannot: such a buffer is a constant, neither saved nor put back.
bool can_be_written(const at::Tensor& buffer) {
  if (buffer.layout() != at::kStrided || buffer.is_inference()) return false;
  for (int64_t i = 0; i < buffer.dim(); ++i)
    if (buffer.size(i) > 1 && buffer.stride(i) == 0) return false;
  return true;
}

template <typename Embedding>
bool has_sparse_gradients(torch::nn::Module& module) {
  const auto* embedding = module.as<Embedding>();
  return embedding && embedding->options.sparse() && embedding->weight.requires_grad();
}

/// Better said now than after the first backward.
void check_dense_gradients(const std::string& path, torch::nn::Module& module) {
  HALFSTEP_CHECK(
      !has_sparse_gradients<torch::nn::EmbeddingImpl>(module) &&
          !has_sparse_gradients<torch::nn::EmbeddingBagImpl>(module),
      "MixedPrecision: '", path, path.empty() ? "" : ".",
      "weight' is that of an embedding with sparse(true), whose gradients are sparse; Halfstep's "
      "optimizers take dense ones. Build it with sparse(false), freeze it, or use GradScaler with a "
      "torch::optim optimizer.");
}

/// Two models of one name would be saved as one.
void check_names_differ(const Contents& contents) {
  std::unordered_set<std::string_view> names;
  const auto check = [&](const auto& items) {
    names.clear();
    for (const auto& [name, tensor] : items)
      HALFSTEP_CHECK(names.insert(name).second, "MixedPrecision: two tensors are called '", name,
                     "'. Give each model a name of its own.");
  };
  check(contents.parameters);
  check(contents.buffers);
}

/// Takes tensors in, each once.
class Collector {
 public:
  void add_parameter(std::string name, const at::Tensor& tensor) {
    if (is_new(tensor)) contents_.parameters.emplace_back(std::move(name), tensor);
  }
  void add_buffer(std::string name, const at::Tensor& tensor) {
    if (tensor.defined() && can_be_written(tensor) && is_new(tensor))
      contents_.buffers.emplace_back(std::move(name), tensor);
  }
  Contents collected() && {
    HALFSTEP_CHECK(!contents_.parameters.empty(), "MixedPrecision: the model has no parameters.");
    check_names_differ(contents_);
    return std::move(contents_);
  }

 private:
  bool is_new(const at::Tensor& tensor) {
    return tensor.defined() && seen_.insert(tensor.unsafeGetTensorImpl()).second;
  }

  Contents contents_;
  std::unordered_set<const c10::TensorImpl*> seen_;
};

}  // namespace

Contents contents_of(const std::vector<NamedModel>& models) {
  Collector collector;
  for (const auto& [name, model] : models) {
    const std::string prefix = name.empty() ? "" : name + ".";
    for (const auto& item : model.get().named_parameters())
      collector.add_parameter(prefix + item.key(), item.value());
    for (const auto& item : model.get().named_buffers())
      collector.add_buffer(prefix + item.key(), item.value());
    check_dense_gradients(name, model.get());
    for (const auto& item : model.get().named_modules(name, /*include_self=*/false))
      check_dense_gradients(item.key(), *item.value());
  }
  return std::move(collector).collected();
}

Contents contents_of(const torch::jit::Module& model) {
  Collector collector;
  for (const auto& item : model.named_parameters()) collector.add_parameter(item.name, item.value);
  for (const auto& item : model.named_buffers()) collector.add_buffer(item.name, item.value);
  return std::move(collector).collected();
}

Contents contents_of(const std::vector<NamedParameter>& parameters) {
  Collector collector;
  for (const auto& [name, tensor] : parameters) {
    HALFSTEP_CHECK(tensor.defined(), "MixedPrecision: parameter '", name, "' is an undefined tensor.");
    collector.add_parameter(name, tensor);
  }
  return std::move(collector).collected();
}

}  // namespace halfstep::train
