#include <ATen/core/grad_mode.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <torch/nn/module.h>

#include <cstring>
#include <unordered_map>

#include "tensor/faults.h"

namespace halfstep {
namespace {

/// visit(name, tensor) for each parameter and buffer that is defined.
template <typename Visit>
void for_each_tensor(const torch::nn::Module& module, Visit visit) {
  for (const auto& item : module.named_parameters())
    if (item.value().defined()) visit(item.key(), item.value());
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) visit(item.key(), item.value());
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor left = a.cpu().contiguous(), right = b.cpu().contiguous();
  return left.nbytes() == right.nbytes() &&
         (left.nbytes() == 0 ||
          std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0);
}

}  // namespace

StateDict module_state(const torch::nn::Module& module) {
  StateDict state;
  for_each_tensor(module, [&](const std::string& name, const at::Tensor& tensor) {
    state.set(name, tensor.detach().clone());
  });
  return state;
}

void load_module_state(torch::nn::Module& module, const StateDict& saved) {
  const at::NoGradGuard no_grad;
  StateDict live;
  for_each_tensor(module, [&](const std::string& name, const at::Tensor& tensor) { live.set(name, tensor); });
  expect_like("module", saved, live);

  Faults faults;
  std::unordered_map<const c10::TensorImpl*, std::string> first_name;
  for_each_tensor(module, [&](const std::string& name, const at::Tensor& tensor) {
    const auto [first, is_new] = first_name.emplace(tensor.unsafeGetTensorImpl(), name);
    faults.expect(is_new || same_bits(saved.tensor(name), saved.tensor(first->second)), "'", name, "' and '",
                  first->second, "' are one tensor in this module, and differ in what was saved");
  });
  faults.throw_if_any("module");
  for_each_tensor(module,
                  [&](const std::string& name, at::Tensor tensor) { tensor.copy_(saved.tensor(name)); });
}

}  // namespace halfstep
