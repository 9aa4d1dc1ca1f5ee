#include <halfstep/checkpoint.h>
#include <halfstep/error.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "tensor/faults.h"
#include "words/names.h"

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

void expect_like(std::string_view whose, const StateDict& saved, const StateDict& live) {
  Faults faults;
  for (const auto& [name, value] : live) {
    const auto found =
        std::find_if(saved.begin(), saved.end(), [&](const auto& item) { return item.first == name; });
    if (found == saved.end()) {
      faults.expect(false, "'", name, "' is missing");
      continue;
    }
    const auto& saved_value = found->second;
    constexpr const char* kinds[] = {"a whole number", "a real number", "a text", "a tensor"};
    if (saved_value.index() != value.index()) {
      faults.expect(false, "'", name, "' is ", kinds[saved_value.index()], ", expected ",
                    kinds[value.index()]);
    } else if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      faults.expect_like(name, std::get<at::Tensor>(saved_value), *tensor);
    }
  }
  for (const auto& [name, value] : saved) faults.expect(live.contains(name), in_quotes(name), " is unknown");
  faults.throw_if_any(std::string(whose).c_str());
}

namespace {

/// visit(name, generator) for each of LibTorch's default generators.
template <typename Visit>
void for_each_generator(Visit visit) {
  visit("cpu", at::detail::getDefaultCPUGenerator());
  const std::optional<c10::DeviceType> accelerator = at::accelerator::getAccelerator();
  if (!accelerator) return;
  for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i)
    visit(detail::concat(c10::DeviceTypeName(*accelerator, /*lower_case=*/true), ".", static_cast<int>(i)),
          at::globalContext().defaultGenerator(at::Device(*accelerator, i)));
}

}  // namespace

StateDict random_state() {
  StateDict saved;
  for_each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    saved.set(name, generator.get_state());
  });
  return saved;
}

void load_random_state(const StateDict& saved) {
  // All before the first is set: type and length of a state are the same on every machine with this LibTorch.
  // The devices of this machine may be others than those where it was saved: what both have goes on, what is
  // new here is left as it is.
  StateDict here, known;
  for (const auto& [name, value] : random_state()) {
    if (name != "cpu" && !saved.contains(name)) continue;
    here.set(name, value);
    if (saved.contains(name)) known.set(name, saved.tensor(name));
  }
  expect_like("random generators", known, here);
  for_each_generator([&](const std::string& name, at::Generator generator) {
    if (!saved.contains(name)) return;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(saved.tensor(name));
  });
}

}  // namespace halfstep
