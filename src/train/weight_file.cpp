#include "train/weight_file.h"

#include <halfstep/error.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/nn/module.h>
#include <torch/serialize/output-archive.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "io/durable_file.h"
#include "tensor/param_checks.h"

namespace halfstep::train {
namespace {

/// Holds the values to write in a model's tensors, because a module may have a save() of its own, which
/// writes the tensors that it has. Puts theirs back at the end of the block.
class TensorsToWrite {
 public:
  TensorsToWrite(const std::vector<Param>& params, c10::ScalarType type) : type_(type) {
    HALFSTEP_CHECK(type == at::kFloat || type == at::kBFloat16, "MixedPrecision: save_weights as ", type,
                   "; it writes at::kFloat, the weights with all their bits, or at::kBFloat16.");
    for (const Param& param : params) {
      take_replaced(param);
      params_.emplace(param.working.unsafeGetTensorImpl(), &param);
    }
  }
  ~TensorsToWrite() {
    for (auto& [tensor, own] : held_) tensor.set_data(own);
  }
  TensorsToWrite(const TensorsToWrite&) = delete;
  TensorsToWrite& operator=(const TensorsToWrite&) = delete;

  void add_parameter(const std::string& name, const at::Tensor& parameter) {
    const auto found = params_.find(parameter.unsafeGetTensorImpl());
    HALFSTEP_CHECK(found != params_.end(), "MixedPrecision: save_weights of a model whose parameter '", name,
                   "' is not among the ", params_.size(),
                   " of this MixedPrecision. Give it the model that this was built with, or a part of it.");
    if (!seen_.insert(parameter.unsafeGetTensorImpl()).second) return;  // tied
    const Param& param = *found->second;
    hold(parameter,
         parameter.scalar_type() == type_ ? parameter.cpu() : full_precision(param).to(at::kCPU, type_));
  }

  void add_buffer(const at::Tensor& buffer) {
    if (!seen_.insert(buffer.unsafeGetTensorImpl()).second) return;
    const bool rounded = type_ == at::kBFloat16 && buffer.is_floating_point();
    hold(buffer, rounded ? buffer.to(at::kCPU, type_) : buffer.cpu());
  }

 private:
  void hold(const at::Tensor& tensor, const at::Tensor& values) {
    if (values.is_same(tensor)) return;
    held_.emplace_back(tensor, tensor.detach());
    held_.back().first.set_data(values);
  }

  const at::NoGradGuard no_grad_{};
  c10::ScalarType type_;
  std::unordered_map<const c10::TensorImpl*, const Param*> params_{};
  std::unordered_set<const c10::TensorImpl*> seen_{};
  std::vector<std::pair<at::Tensor, at::Tensor>> held_{};  // with what was in it
};

/// `write` hands the bytes of the file over, piece by piece.
using Sink = std::function<std::size_t(const void*, std::size_t)>;
template <typename Write>
void write_durably(const std::filesystem::path& path, Write write) {
  files::DurableFile file(path);
  // Not through LibTorch's writer: its destructor would write on, and end the process (2.13).
  std::exception_ptr refused;
  write(Sink([&](const void* bytes, std::size_t count) {
    try {
      if (!refused) file.write(std::span(static_cast<const std::byte*>(bytes), count));
    } catch (...) {
      refused = std::current_exception();
    }
    return count;
  }));
  if (refused) std::rethrow_exception(refused);
  file.commit();
}

}  // namespace

void write_weights(const std::filesystem::path& path, torch::nn::Module& model,
                   const std::vector<Param>& params, c10::ScalarType type) {
  TensorsToWrite tensors(params, type);
  for (const auto& item : model.named_parameters()) tensors.add_parameter(item.key(), item.value());
  for (const at::Tensor& buffer : model.buffers()) tensors.add_buffer(buffer);
  torch::serialize::OutputArchive archive;
  model.save(archive);
  write_durably(path, [&](const Sink& sink) { archive.save_to(sink); });
}

void write_weights(const std::filesystem::path& path, torch::jit::Module& model,
                   const std::vector<Param>& params, c10::ScalarType type) {
  TensorsToWrite tensors(params, type);
  for (const auto& item : model.named_parameters()) tensors.add_parameter(item.name, item.value);
  for (const at::Tensor& buffer : model.buffers()) tensors.add_buffer(buffer);
  write_durably(path, [&](const Sink& sink) { torch::jit::ExportModule(model, sink); });
}

}  // namespace halfstep::train
