#include "scaling/unscaling.h"

#include <halfstep/error.h>
#include <halfstep/scaling.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_set>

namespace halfstep::scaling {
namespace {

std::string name_of(const at::Tensor& parameter, size_t group, size_t index, const ParameterNames& names) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  if (found != names.end()) return found->second;
  return detail::concat("parameter ", index, " (group ", group, ", shape ", parameter.sizes(), ")");
}

/// visit(parameter, group, index in the group) for each parameter that has a gradient.
template <typename Visit>
void for_each_grad(torch::optim::Optimizer& optimizer, Visit visit) {
  auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    auto& params = groups[group].params();
    for (size_t index = 0; index < params.size(); ++index)
      if (params[index].grad().defined()) visit(params[index], group, index);
  }
}

at::Tensor values_of(const at::Tensor& grad) { return grad.is_sparse() ? grad._values() : grad; }

bool can_be_unscaled(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

at::Tensor in_fp32(const at::Tensor& grad) {
  if (!grad.is_sparse()) return grad.to(at::kFloat);
  // Converted before duplicate rows are summed: 64000 + 64000 is Inf in FP16 and right in FP32.
  return at::_sparse_coo_tensor_unsafe(grad._indices(), grad._values().to(at::kFloat), grad.sizes(),
                                       grad.options().dtype(at::kFloat), grad.is_coalesced());
}

/// What CUDA's kernel refuses to do for BF16 (pytorch/pytorch#127176), in three operations more.
void multiply_and_check_bf16_(const std::vector<at::Tensor>& grads, double multiplier, at::Tensor& flag) {
  std::vector<at::Tensor> filled;  // nothing has no largest magnitude
  for (const at::Tensor& grad : grads)
    if (grad.numel() > 0) filled.push_back(grad);
  if (filled.empty()) return;
  const at::Tensor largest =
      at::stack(at::_foreach_norm(filled, std::numeric_limits<double>::infinity(), at::kFloat));
  flag.copy_(at::maximum(flag, at::isfinite(largest).all().logical_not().to(at::kFloat)));
  at::_foreach_mul_(filled, multiplier);
}

}  // namespace

at::Tensor& NonFiniteFlags::on(c10::Device device) {
  const auto found = std::find_if(flags_.begin(), flags_.end(),
                                  [&](const at::Tensor& flag) { return flag.device() == device; });
  if (found != flags_.end()) return *found;
  return flags_.emplace_back(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device)));
}

bool NonFiniteFlags::any_set() const {
  return std::any_of(flags_.begin(), flags_.end(),
                     [](const at::Tensor& flag) { return flag.item<float>() != 0; });
}

bool UnscaledGrads::has_changed(const at::Tensor& grad) const {
  return held_.at(grad.unsafeGetTensorImpl()).version != grad._version();
}

void UnscaledGrads::insert(const at::Tensor& grad) {
  c10::weak_intrusive_ptr<c10::TensorImpl> held(grad.getIntrusivePtr());
  held_.insert_or_assign(grad.unsafeGetTensorImpl(), Held{std::move(held), grad._version()});
}

std::string Grad::parameter_name(const ParameterNames& names) const {
  return name_of(parameter, group, index, names);
}

std::vector<Grad> grads_of(torch::optim::Optimizer& optimizer) {
  std::vector<Grad> grads;
  std::unordered_set<const c10::TensorImpl*> seen;
  for_each_grad(optimizer, [&](at::Tensor& parameter, size_t group, size_t index) {
    const at::Tensor& grad = parameter.grad();
    if (seen.insert(grad.unsafeGetTensorImpl()).second)
      grads.push_back({grad, values_of(grad), parameter, group, index});
  });
  return grads;
}

std::vector<at::Tensor> summed_rows(const std::vector<Grad>& grads) {
  std::vector<at::Tensor> sums;
  for (const auto& grad : grads)
    if (grad.tensor.is_sparse() && !grad.tensor.is_coalesced())
      sums.push_back(grad.tensor.coalesce()._values());
  return sums;
}

void make_unscalable_(torch::optim::Optimizer& optimizer, const ParameterNames& names) {
  for_each_grad(optimizer, [&](at::Tensor& parameter, size_t group, size_t index) {
    at::Tensor& grad = parameter.mutable_grad();
    HALFSTEP_CHECK(can_be_unscaled(grad.scalar_type()), "GradScaler: the gradient of ",
                   name_of(parameter, group, index, names), " is ", grad.scalar_type(),
                   "; only Float, Double, Half and BFloat16 gradients can be un-scaled.");
    HALFSTEP_CHECK(grad.layout() == at::kStrided || grad.layout() == at::kSparse,
                   "GradScaler: the gradient of ", name_of(parameter, group, index, names), " has layout ",
                   grad.layout(), "; only dense and sparse COO gradients can be un-scaled.");
    if (grad.scalar_type() == at::kHalf)
      grad = in_fp32(grad);
    else if (!grad.is_sparse() && !grad.is_non_overlapping_and_dense())
      grad = grad.clone(at::MemoryFormat::Contiguous);
  });
}

void multiply_and_check_(const std::vector<at::Tensor>& values, double multiplier, NonFiniteFlags& flags) {
  // CUDA's kernel takes one device and one type a call.
  std::vector<at::Tensor> rest = values;
  while (!rest.empty()) {
    const at::Tensor first = rest.front();
    const auto others = std::stable_partition(rest.begin(), rest.end(), [&](const at::Tensor& value) {
      return value.device() == first.device() && value.scalar_type() == first.scalar_type();
    });
    const std::vector<at::Tensor> batch(rest.begin(), others);
    rest.erase(rest.begin(), others);
    if (first.scalar_type() == at::kBFloat16 && !first.is_cpu()) {
      multiply_and_check_bf16_(batch, multiplier, flags.on(first.device()));
      continue;
    }
    const auto factor =
        at::full({}, multiplier, at::TensorOptions().dtype(at::kFloat).device(first.device()));
    at::_amp_foreach_non_finite_check_and_unscale_(batch, flags.on(first.device()), factor);
  }
}

std::string first_non_finite(torch::optim::Optimizer& optimizer, const ParameterNames& names) {
  for (const auto& grad : grads_of(optimizer)) {
    const at::Tensor values = grad.tensor.is_sparse() ? grad.tensor.coalesce()._values() : grad.values;
    if (!at::isfinite(values).all().item<bool>()) return grad.parameter_name(names);
  }
  return "";
}

}  // namespace halfstep::scaling

namespace halfstep {
namespace {

using Lists = std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>>;

/// Those of accelerators, by device and type: one operation for each list.
Lists lists_on_accelerators(const std::vector<at::Tensor>& grads) {
  Lists lists;
  for (const at::Tensor& grad : grads)
    if (!grad.is_cpu()) lists[{grad.device().str(), grad.scalar_type()}].push_back(grad);
  return lists;
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm) {
  HALFSTEP_CHECK(max_norm > 0, "clip_grad_norm_: max_norm is ", max_norm, ", expected a positive number.");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads, norms;
  std::unordered_set<const c10::TensorImpl*> seen;  // Module::parameters() lists a tied weight once a name
  for (const auto& param : params) {
    if (!param.grad().defined() || !seen.insert(param.unsafeGetTensorImpl()).second) continue;
    // A sparse gradient's norm is that of its sums, so duplicate rows are added first.
    if (param.grad().is_sparse()) param.mutable_grad() = param.grad().coalesce();
    grads.push_back(param.grad().is_sparse() ? param.grad()._values() : param.grad());
    if (grads.back().is_cpu())
      norms.push_back(at::linalg_vector_norm(grads.back(), 2, std::nullopt, false, at::kDouble));
  }
  const Lists lists = lists_on_accelerators(grads);
  for (const auto& [key, list] : lists) {
    // In FP64, as on the CPU: the norm of finite gradients is finite then. Apple's devices have none.
    const at::ScalarType type = list.front().is_mps() ? at::kFloat : at::kDouble;
    norms.push_back(at::linalg_vector_norm(at::stack(at::_foreach_norm(list, 2, type)), 2));
  }
  if (norms.empty()) return at::zeros({}, at::kDouble);

  const auto home = norms.front().device();
  // A copy to the host is read at once, and waited for.
  for (auto& norm : norms) norm = norm.to(home, norms.front().scalar_type(), /*non_blocking=*/!home.is_cpu());
  const auto total_norm = at::linalg_vector_norm(at::stack(norms), 2);
  const auto shrink =
      (max_norm / (total_norm + 1e-6)).clamp_max(1.0);  // 1e-6 as in torch's own clip_grad_norm_
  const auto multiplier = at::where(at::isfinite(total_norm), shrink, at::ones_like(shrink));
  for (auto& grad : grads)
    if (grad.is_cpu()) grad.mul_(multiplier.to(grad.device(), /*non_blocking=*/true));
  for (const auto& [key, list] : lists)
    at::_foreach_mul_(list, multiplier.to(list.front().device(), at::kFloat, /*non_blocking=*/true));
  return total_norm;
}

}  // namespace halfstep
