#include "train/grad_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace halfstep::train {

struct GradHooks::State {
  std::function<void(std::size_t)> on_grad;
  std::mutex mutex;  // autograd has a thread for each device
  bool armed = false;
};

struct GradHooks::Watched {
  c10::intrusive_ptr<torch::autograd::Node>
      accumulator;  // autograd itself does not keep it between two graphs
  uintptr_t hook = 0;
};

GradHooks::GradHooks(std::function<void(std::size_t)> on_grad) : state_(std::make_shared<State>()) {
  state_->on_grad = std::move(on_grad);
}

GradHooks::~GradHooks() {
  for (const Watched& each : watched_)
    if (each.accumulator) each.accumulator->del_post_hook(each.hook);
}

void GradHooks::watch(const std::vector<Param>& params) {
  watched_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    Watched& each = watched_[i];
    const at::Tensor& working = params[i].working;
    // Another one where other memory was put under the parameter, or it was frozen for a while.
    auto accumulator = working.requires_grad() ? torch::autograd::impl::grad_accumulator(working)
                                               : decltype(each.accumulator)();
    if (accumulator == each.accumulator) continue;
    if (each.accumulator) each.accumulator->del_post_hook(each.hook);
    each = {.accumulator = std::move(accumulator), .hook = 0};
    if (!each.accumulator) continue;
    auto call = [state = state_, i](const torch::autograd::variable_list& outputs,
                                    const torch::autograd::variable_list&) {
      const std::lock_guard lock(state->mutex);
      if (state->armed) state->on_grad(i);
      return outputs;
    };
    each.hook = each.accumulator->add_post_hook(
        std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(call)));
  }
}

GradHooks::Armed::Armed(GradHooks& hooks, const std::vector<Param>& params) : hooks_(hooks) {
  hooks.watch(params);
  hooks.state_->armed = true;
}
GradHooks::Armed::~Armed() { hooks_.state_->armed = false; }

}  // namespace halfstep::train
