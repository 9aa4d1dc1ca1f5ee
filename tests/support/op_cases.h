// One small call of each operation of the policy table that has a CPU kernel.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace halfstep::testing {

/// Makes the floating-point inputs of one call and keeps them, so that their gradients can be looked at.
/// `types` are dealt out in turn: {BF16, FP32} gives every second tensor FP32.
class Inputs {
 public:
  /// As activations, the call is given copies of the leaves, which autograd knows as computed.
  explicit Inputs(std::vector<at::ScalarType> types, bool as_activations = false,
                  at::Device device = at::kCPU)
      : types_(std::move(types)), as_activations_(as_activations), device_(device) {}

  /// Between 0.1 and 0.9: inside the domain of log, acos, erfinv and of probabilities.
  template <typename... Sizes>
  at::Tensor operator()(Sizes... sizes) {
    return keep(fractions({static_cast<int64_t>(sizes)...}));
  }

  /// The same without a gradient, for arguments that LibTorch does not differentiate.
  template <typename... Sizes>
  at::Tensor fixed(Sizes... sizes) {
    return put(fractions({static_cast<int64_t>(sizes)...}).to(next_type()));
  }

  /// Indices, masks and the like, on the device of the call.
  at::Tensor put(const at::Tensor& values) const { return values.to(device_); }

  /// Well conditioned, symmetric, positive definite; distinct eigenvalues.
  at::Tensor spd(int64_t n) {
    return keep(at::diag(at::arange(1, n + 1, at::kFloat)) + 0.125 * at::ones({n, n}));
  }

  /// A leaf of the next type, or the activation that is a copy of it.
  at::Tensor keep(const at::Tensor& values) {
    leaves_.push_back(
        values.to(device_, next_type(), /*non_blocking=*/false, /*copy=*/true).requires_grad_());
    return as_activations_ ? leaves_.back().clone() : leaves_.back();
  }

  const std::vector<at::Tensor>& leaves() const { return leaves_; }

 private:
  static at::Tensor fractions(at::IntArrayRef sizes) { return at::rand(sizes) * 0.8 + 0.1; }
  at::ScalarType next_type() { return types_[dealt_++ % types_.size()]; }

  std::vector<at::ScalarType> types_;
  bool as_activations_;
  at::Device device_;
  std::size_t dealt_ = 0;
  std::vector<at::Tensor> leaves_;
};

struct OpCase {
  std::string_view op;
  std::function<at::Tensor(Inputs&)> call;  // the output whose type the table speaks of
  bool differentiable = true;
  bool has_fp16_kernel = true;   // on CPU, for training; without one the scope computes in FP32
  bool ends_in_product = false;  // its output is that of a matrix product inside, which has a row of its own

  /// An operation of Halfstep's own, which a process without it lacks.
  bool is_ours() const { return op.starts_with("halfstep::"); }
};

std::span<const OpCase> op_cases();

/// Rows that cannot be run here, each with the reason.
struct OpWithoutCpuKernel {
  std::string_view op;
  std::string_view reason;
};
std::span<const OpWithoutCpuKernel> ops_without_cpu_kernel();

}  // namespace halfstep::testing
