// The gradients of an optimizer, as the engine's kernels take them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace halfstep::scaling {

using ParameterNames = std::unordered_map<const c10::TensorImpl*, std::string>;

/// "Was an Inf or a NaN met?", one 0-dim FP32 flag a device, written by the device.
class NonFiniteFlags {
 public:
  at::Tensor& on(c10::Device device);
  bool empty() const { return flags_.empty(); }
  bool any_set() const;  ///< waits for the devices: one read each

 private:
  std::vector<at::Tensor> flags_;
};

struct Grad {
  at::Tensor tensor;
  at::Tensor values;     ///< the gradient itself, or the values of a sparse one
  at::Tensor parameter;  ///< whose it is
  size_t group, index;   ///< its place in the optimizer

  std::string parameter_name(const ParameterNames& names) const;
};

/// Which gradients were un-scaled, and in what version: two optimizers may share one. Keeps no memory of a
/// gradient alive, and is not fooled when one is freed and another takes its address.
class UnscaledGrads {
 public:
  bool contains(const at::Tensor& grad) const { return held_.count(grad.unsafeGetTensorImpl()) > 0; }
  /// Whether it was written to since it was inserted.
  bool has_changed(const at::Tensor& grad) const;
  /// In its present version; a second time renews it.
  void insert(const at::Tensor& grad);
  void clear() { held_.clear(); }

 private:
  struct Held {
    c10::weak_intrusive_ptr<c10::TensorImpl> grad;  // while it is held, no other tensor gets the address
    int64_t version;
  };
  std::unordered_map<const c10::TensorImpl*, Held> held_;
};

/// The gradients of this optimizer, as they are, each once though two parameters may share it. Parameters
/// without one are left out.
std::vector<Grad> grads_of(torch::optim::Optimizer& optimizer);

/// Makes every gradient one that can be multiplied in place: FP16 ones are replaced by FP32 ones, and ones
/// whose elements may overlap in memory by copies. A type that cannot be un-scaled is refused by name.
void make_unscalable_(torch::optim::Optimizer& optimizer, const ParameterNames& names);

/// Sparse gradients with repeated rows, summed: a sum may overflow where its terms do not.
std::vector<at::Tensor> summed_rows(const std::vector<Grad>& grads);

/// Multiplies in place, and sets the flag of the device where a value was Inf or NaN *before* that.
void multiply_and_check_(const std::vector<at::Tensor>& values, double multiplier, NonFiniteFlags& flags);

/// The name of the first parameter whose gradient is not finite; empty if all are. Reads on the host, a
/// parameter at a time, so it is for after a skip, not for every step.
std::string first_non_finite(torch::optim::Optimizer& optimizer, const ParameterNames& names);

}  // namespace halfstep::scaling
