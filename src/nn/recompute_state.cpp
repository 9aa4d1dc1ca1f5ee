#include "nn/recompute_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <algorithm>
#include <mutex>

namespace halfstep {
namespace {

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

/// LibTorch's cache of cast weights is off meanwhile: nobody would empty it.
class RecomputeState::AutocastGuard {
 public:
  explicit AutocastGuard(const std::vector<Autocast>& wanted)
      : outer_(current()),
        outer_cache_enabled_(at::autocast::is_autocast_cache_enabled()),
        outer_graph_optimizer_(torch::jit::getGraphExecutorOptimize()) {
    set(wanted);
    at::autocast::set_autocast_cache_enabled(false);
    // As inside an AutocastScope (docs/decisions/0083).
    if (std::any_of(wanted.begin(), wanted.end(), [](const Autocast& each) { return each.enabled; }))
      torch::jit::setGraphExecutorOptimize(false);
  }
  ~AutocastGuard() {
    torch::jit::setGraphExecutorOptimize(outer_graph_optimizer_);
    set(outer_);
    at::autocast::set_autocast_cache_enabled(outer_cache_enabled_);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

  static std::vector<Autocast> current() {
    std::vector<Autocast> found;
    for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
      found.push_back(
          {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
    }
    return found;
  }

 private:
  static void set(const std::vector<Autocast>& wanted) {
    for (const auto& [device, enabled, low] : wanted) {
      at::autocast::set_autocast_enabled(device, enabled);
      at::autocast::set_autocast_dtype(device, low);
    }
  }

  std::vector<Autocast> outer_;
  bool outer_cache_enabled_, outer_graph_optimizer_;
};

class RecomputeState::RandomGuard {
 public:
  explicit RandomGuard(const std::vector<Random>& wanted) : outer_(wanted) {
    for (auto& [generator, state] : outer_) state = state_of(generator);
    for (const auto& [generator, state] : wanted) {
      at::Generator same = generator;
      set_state(same, state);
    }
  }
  ~RandomGuard() {
    for (auto& [generator, state] : outer_) set_state(generator, state);
  }
  RandomGuard(const RandomGuard&) = delete;
  RandomGuard& operator=(const RandomGuard&) = delete;

 private:
  std::vector<Random> outer_;
};

RecomputeState::RecomputeState(const std::vector<at::Tensor>& tensors) : autocast_(AutocastGuard::current()) {
  if (const ActivePolicy* policy = active_policy()) policy_ = *policy;
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_cuda()) continue;
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  }
  for (const at::Device device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    random_.push_back({generator, state_of(generator)});
  }
}

void RecomputeState::run(const std::function<void()>& body) const {
  const at::AutoGradMode gradients_on(true);
  const AutocastGuard autocast(autocast_);
  const c10::DebugInfoGuard policy(active_policy_kind(), as_debug_info(policy_));
  const RandomGuard random(random_);
  body();
}

}  // namespace halfstep
