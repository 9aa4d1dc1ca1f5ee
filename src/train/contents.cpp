#include "train/contents.h"

#include <halfstep/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tensor/grads_on_device.h"

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
  std::vector<std::string> embeddings;
  for (const auto& [name, model] : models) {
    const std::string prefix = name.empty() ? "" : name + ".";
    for (const auto& item : model.get().named_parameters())
      collector.add_parameter(prefix + item.key(), item.value());
    for (const auto& item : model.get().named_buffers())
      collector.add_buffer(prefix + item.key(), item.value());
    check_dense_gradients(name, model.get());
    for (const auto& item : model.get().named_modules(name, /*include_self=*/false)) {
      check_dense_gradients(item.key(), *item.value());
      if (item.value()->as<torch::nn::EmbeddingImpl>() || item.value()->as<torch::nn::EmbeddingBagImpl>())
        embeddings.push_back(item.key() + ".weight");
    }
  }
  Contents contents = std::move(collector).collected();
  contents.embeddings = std::move(embeddings);
  return contents;
}

Contents contents_of(const torch::jit::Module& model) {
  Collector collector;
  for (const auto& item : model.named_parameters()) collector.add_parameter(item.name, item.value);
  for (const auto& item : model.named_buffers()) collector.add_buffer(item.name, item.value);
  Contents contents = std::move(collector).collected();
  contents.present_buffers = [model] {
    NamedBuffers present;
    for (const auto& item : model.named_buffers()) present.emplace_back(item.name, item.value);
    return present;
  };
  return contents;
}

Contents contents_of(const std::vector<NamedParameter>& parameters) {
  Collector collector;
  for (const auto& [name, tensor] : parameters) {
    HALFSTEP_CHECK(tensor.defined(), "MixedPrecision: parameter '", name, "' is an undefined tensor.");
    HALFSTEP_CHECK(
        tensor.is_leaf(), "MixedPrecision: parameter '", name,
        "' was computed from other tensors, so that backward leaves it without a gradient. Give it as "
        "tensor.detach().requires_grad_().");
    collector.add_parameter(name, tensor);
  }
  return std::move(collector).collected();
}

namespace {

constexpr int64_t kSmallElements = 1 << 16;

bool all_finite(const at::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.isfinite().all().item<bool>();
}

bool has_become_non_finite(const at::Tensor& now, const at::Tensor& before) {
  return all_finite(before) && !all_finite(now);
}

}  // namespace

namespace {

/// Of another shape, if forward let it grow, it gets the memory of a copy.
void put_back(at::Tensor& buffer, const at::Tensor& values) {
  if (buffer.sizes() == values.sizes() && buffer.scalar_type() == values.scalar_type())
    buffer.copy_(values);
  else
    buffer.set_data(values.clone());
}

}  // namespace

BufferGuard::BufferGuard(NamedBuffers buffers, std::function<NamedBuffers()> present)
    : buffers_(std::move(buffers)), present_(std::move(present)), copies_(buffers_.size()) {
  copy_buffers();
}

void BufferGuard::find_present() {
  if (!present_ || buffers_.empty()) return;
  const NamedBuffers listed = present_();
  const std::unordered_map<std::string_view, at::Tensor> present(listed.begin(), listed.end());
  for (auto& [name, buffer] : buffers_)
    if (const auto found = present.find(name); found != present.end() && found->second.defined())
      buffer = found->second;
}

void BufferGuard::begin_step() {
  if (step_begun_) return;
  copy_buffers();
  step_begun_ = true;
}

void BufferGuard::copy_buffers() {
  const at::NoGradGuard no_grad;
  find_present();
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor& buffer = buffers_[i].second;
    Copy& copy = copies_[i];
    if (!copy.wanted) continue;
    if (copy.values.defined() && copy.values.sizes() == buffer.sizes() &&
        copy.values.scalar_type() == buffer.scalar_type()) {
      copy.values.copy_(buffer);
    } else {
      copy.values = buffer.detach().clone();
    }
  }
}

void BufferGuard::restart() {
  step_begun_ = abandoned_ = false;
  copy_buffers();
}

void BufferGuard::resume_step(const std::vector<at::Tensor>& at_start) {
  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (at_start[i].defined())
      copies_[i] = {.values = at_start[i].to(buffers_[i].second.device(), /*non_blocking=*/false,
                                             /*copy=*/true)};
  step_begun_ = true;
}

void BufferGuard::end_step(bool skipped) {
  const at::NoGradGuard no_grad;
  find_present();
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor& buffer = buffers_[i].second;
    Copy& copy = copies_[i];
    if (!copy.wanted) continue;
    // By values: LibTorch's batch norm writes to its statistics without moving their version (2.13).
    if (first_step_ && buffer.numel() > kSmallElements && at::equal(buffer, copy.values)) {
      copy = {.wanted = false};
    } else if (skipped || (abandoned_ && has_become_non_finite(buffer, copy.values))) {
      put_back(buffer, copy.values);
    }
  }
  first_step_ = false;
  restart();
}

void BufferGuard::end_step_on_device(const GradSummary& grads) {
  const at::NoGradGuard no_grad;
  find_present();
  const at::Tensor& finite = grads.on_device()->finite;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor& buffer = buffers_[i].second;
    const at::Tensor& values = copies_[i].values;
    if (!copies_[i].wanted) continue;
    if (buffer.sizes() != values.sizes() || buffer.scalar_type() != values.scalar_type()) {
      // Of another shape now: which of the two it is to have must be known, and is waited for.
      if (!grads.finite()) put_back(buffer, values);
      continue;
    }
    // After an abandoned forward a buffer that has become non-finite goes back whatever this step was.
    at::Tensor keeps = finite;
    if (abandoned_ && buffer.is_floating_point())
      keeps = finite.logical_and(
          buffer.isfinite().all().logical_or(values.isfinite().all().logical_not()).to(finite.device()));
    buffer.copy_(at::where(keeps.to(buffer.device()), buffer, values));
  }
  first_step_ = false;
  restart();
}

}  // namespace halfstep::train
