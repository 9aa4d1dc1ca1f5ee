#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <halfstep/scaling.h>

#include <unordered_set>

namespace halfstep {

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
    norms.push_back(at::linalg_vector_norm(grads.back(), 2, std::nullopt, false, at::kDouble));
  }
  if (norms.empty()) return at::zeros({}, at::kDouble);

  const auto home = norms.front().device();
  for (auto& norm : norms) norm = norm.to(home, /*non_blocking=*/true);
  const auto total_norm = at::linalg_vector_norm(at::stack(norms), 2);
  const auto shrink =
      (max_norm / (total_norm + 1e-6)).clamp_max(1.0);  // 1e-6 as in torch's own clip_grad_norm_
  const auto multiplier = at::where(at::isfinite(total_norm), shrink, at::ones_like(shrink));
  for (auto& grad : grads) grad.mul_(multiplier.to(grad.device(), /*non_blocking=*/true));
  return total_norm;
}

}  // namespace halfstep
