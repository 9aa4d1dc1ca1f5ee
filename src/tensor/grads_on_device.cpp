#include "tensor/grads_on_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <halfstep/error.h>

#include <cmath>
#include <unordered_set>
#include <utility>

#include "tensor/dense.h"

namespace halfstep {
namespace {

// As on the host: of the un-scaled norm. The next number above 2^63, for `less than`: an Inf, which the norm
// is where a square does not fit FP32, is not less than a bound that is one too.
constexpr double kAboveLargestNorm = 0x1p63 * (1 + 0x1p-23);

enum : std::size_t { kNorms, kNorm, kFinite, kLossScale };

}  // namespace

const GradFindings& GradsOnDevice::read() const {
  const std::lock_guard lock(*mutex);
  if (found_) return *found_;
  GradFindings found = known;
  const double scale = loss_scale.defined() ? arrival.wait_for(kLossScale).item<double>() : 1.0;
  const at::Tensor& norms = arrival.wait_for(kNorms);
  const auto* each = norms.const_data_ptr<float>();
  found.loss_scale = scale;
  found.norm = arrival.wait_for(kNorm).item<double>() / scale;
  found.finite = arrival.wait_for(kFinite).item<bool>();
  std::size_t largest = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool finite = std::isfinite(each[i]);
    if (!finite && found.first_bad.empty()) found.first_bad = names[i];
    if (each[i] > each[largest]) largest = i;
    if (detail == GradDetail::PerParam)
      found.params.push_back({.name = names[i], .norm = each[i] / scale, .finite = finite});
  }
  if (found.finite)
    found.first_bad.clear();
  else if (found.first_bad.empty())
    found.first_bad = names[largest];
  for (std::size_t i = 0; i < micro_batches.size() && !found.finite && found.micro_batch < 0; ++i) {
    if (micro_batches[i].finite()) continue;
    found.micro_batch = first_micro_batch + static_cast<int64_t>(i);
    found.first_bad = micro_batches[i].first_bad();
  }
  return found_.emplace(std::move(found));
}

GradSummary inspect_on_device(const std::vector<Param>& params, const at::Tensor& loss_scale,
                              GradDetail detail, std::vector<GradSummary> micro_batches,
                              int64_t first_micro_batch, const at::Tensor& bad_elsewhere) {
  const at::NoGradGuard no_grad;
  GradFindings known;
  std::vector<std::string> names;
  std::vector<at::Tensor> grads;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const Param& param : params) {
    const at::Tensor& grad = param.working.grad();
    if (!grad.defined()) {
      if (param.working.requires_grad()) known.without_grad.push_back(param.name);
      continue;
    }
    if (!seen.insert(param.working.unsafeGetTensorImpl()).second) continue;
    check_grad(param, grad);
    names.push_back(param.name);
    grads.push_back(grad);
  }
  known.any = !grads.empty();
  if (grads.empty()) return GradSummary(std::move(known));

  const at::Tensor norms = at::stack(at::_foreach_norm(grads, 2, at::kFloat));
  const at::Tensor norm = at::linalg_vector_norm(norms);
  // False for a NaN. Micro-batches that were not finite may have cancelled.
  at::Tensor finite =
      loss_scale.defined() ? at::lt(norm, loss_scale * kAboveLargestNorm) : at::lt(norm, kAboveLargestNorm);
  std::vector<at::Tensor> each_finite;
  for (const GradSummary& micro_batch : micro_batches)
    if (micro_batch.on_device()) each_finite.push_back(micro_batch.on_device()->finite);
  if (!each_finite.empty()) finite = finite.logical_and(at::stack(each_finite).all());
  if (bad_elsewhere.defined()) finite = finite.logical_and(at::eq(bad_elsewhere, 0));
  at::Tensor found_inf = at::empty({}, norm.options());
  at::eq_out(found_inf, finite, 0);
  std::vector<at::Tensor> sent = {norms, norm, finite};
  if (loss_scale.defined()) sent.push_back(loss_scale);
  return GradSummary(std::make_shared<const GradsOnDevice>(
      GradsOnDevice{.norm = norm,
                    .finite = finite,
                    .found_inf = found_inf,
                    .loss_scale = loss_scale,
                    .loss_scale_version = loss_scale.defined() ? loss_scale._version() : 0,
                    .known = std::move(known),
                    .names = std::move(names),
                    .micro_batches = std::move(micro_batches),
                    .first_micro_batch = first_micro_batch,
                    .detail = detail,
                    .arrival = Arrival(sent)}));
}

bool GradsOnDevice::arrived() const {
  const std::lock_guard lock(*mutex);
  return found_.has_value() || arrival.arrived();
}

at::Tensor divisor_on_device(const GradMultiplier& multiplier) {
  const GradsOnDevice& grads = *multiplier.grads()->on_device();
  HALFSTEP_CHECK(
      !grads.loss_scale.defined() || grads.loss_scale._version() == grads.loss_scale_version,
      "the loss scale has changed since these gradients were inspected: call optimizer.step before "
      "mp.advance.");
  const double factor = multiplier.factor(), max_norm = multiplier.max_norm();
  at::Tensor divisor = grads.loss_scale;
  if (std::isfinite(max_norm)) {
    // (norm x |factor| + 1e-6) / max_norm, where it is above 1, with the loss scale in it as in the norm.
    const at::Tensor shrink = grads.norm * (std::abs(factor) / max_norm);
    divisor = divisor.defined() ? at::maximum(shrink.add(divisor, 1e-6 / max_norm), divisor)
                                : shrink.add(1e-6 / max_norm).clamp_min(1);
  }
  if (factor == 1) return divisor;
  return divisor.defined() ? divisor / factor : at::full({}, 1 / factor, grads.norm.options());
}

}  // namespace halfstep
