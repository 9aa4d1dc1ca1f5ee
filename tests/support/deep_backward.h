// Backward inside backward, as deep as makes autograd change threads.
#pragma once

#include <torch/torch.h>

#include <functional>

namespace halfstep::testing {

/// Runs a backward that calls backward, 70 times, and `action` in the innermost. LibTorch 2.13 moves to a
/// thread of its own at 60.
class DeepBackward {
 public:
  static void run(const std::function<void()>& action) {
    action_ = action;
    Nest::apply(at::ones(1).requires_grad_(), 70).sum().backward();
    action_ = nullptr;
  }

 private:
  struct Nest : torch::autograd::Function<Nest> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t depth) {
      context->saved_data["depth"] = depth;
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list grads) {
      const int64_t depth = context->saved_data["depth"].toInt();
      if (depth == 0) {
        action_();
      } else {
        const at::AutoGradMode with_grad(true);
        Nest::apply(at::ones(1).requires_grad_(), depth - 1).sum().backward();
      }
      return {grads[0], at::Tensor()};
    }
  };

  static inline std::function<void()> action_;
};

}  // namespace halfstep::testing
