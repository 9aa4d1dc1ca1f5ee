#include <halfstep/error.h>
#include <halfstep/grads.h>
#include <halfstep/step_report.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <unordered_set>

#include "kernels/update.h"
#include "tensor/dense.h"
#include "tensor/grad_squares.h"
#include "tensor/grads_on_device.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

// The largest norm whose square AdamW can keep in FP32: (2^63)^2 = 2^126, with room for the sum of two.
constexpr double kLargestNorm = 0x1p63;

/// Those to look at; undefined where there is none.
std::vector<at::Tensor> grads_of(const std::vector<Param>& params) {
  std::vector<at::Tensor> grads(params.size());
  std::unordered_set<const c10::TensorImpl*>
      seen;  // a tied parameter counts once in the norm, as it is stepped once
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = params[i].working.grad();
    if (!grad.defined() || !seen.insert(params[i].working.unsafeGetTensorImpl()).second) continue;
    check_grad(params[i], grad);
    grads[i] = grad;
  }
  return grads;
}

}  // namespace

GradSummary inspect_grads(const std::vector<Param>& params, std::optional<double> given_loss_scale,
                          GradDetail detail) {
  if (!given_loss_scale)
    for (const Param& param : params)
      HALFSTEP_CHECK(!param.loss_scaled || !param.working.grad().defined(),
                     "inspect_grads: the gradient of '", param.name,
                     "' carries a loss scale, and none is given. Use mp.inspect_grads(), or "
                     "inspect_grads(params, mp.loss_scale()).");
  const double loss_scale = given_loss_scale.value_or(1.0);
  HALFSTEP_CHECK(loss_scale > 0 && std::isfinite(loss_scale), "inspect_grads: loss_scale is ", loss_scale,
                 ", expected a positive number; 1 where the loss was not scaled.");
  const at::NoGradGuard no_grad;
  for (const Param& param : params)
    HALFSTEP_CHECK(param.working.device() == params.front().working.device(), "inspect_grads: parameter '",
                   param.name, "' is on ", param.working.device(), ", '", params.front().name, "' on ",
                   params.front().working.device(), ". Inspect those of each device by themselves.");
  if (!params.empty() && !kernels_serve(params.front().working)) {
    HALFSTEP_CHECK(std::isnormal(static_cast<float>(loss_scale)) && loss_scale <= 0x1p126,
                   "inspect_grads: loss_scale is ", loss_scale,
                   ", expected a number that FP32 holds, up to 2^126.");
    const auto fp32 = at::TensorOptions(params.front().working.device()).dtype(at::kFloat);
    return inspect_on_device(params, given_loss_scale ? at::full({}, loss_scale, fp32) : at::Tensor(),
                             detail);
  }
  return GradSummary(findings_of(params, squares_of(grads_of(params)), loss_scale, detail));
}

GradSquares squares_of(const std::vector<at::Tensor>& grads) {
  std::vector<at::Tensor> dense;
  std::vector<int64_t> counts;
  for (const at::Tensor& grad : grads) {
    const bool as_it_is = !grad.defined() || grad.is_non_overlapping_and_dense();
    dense.push_back(as_it_is ? grad : grad.contiguous());
    counts.push_back(grad.defined() ? grad.numel() : 0);
  }
  const auto chunks = chunks_of(counts);
  // Chunk by chunk, and added up in their order afterwards: the same bits whoever took which chunk.
  std::vector<double> sums(chunks.size());
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const auto [array, first, count] = chunks[i];
    const at::Tensor& grad = dense[array];
    sums[i] = sum_of_squares(*training_format(grad.scalar_type()),
                             address_of(grad.const_data_ptr(), first, grad.element_size()), count);
  });
  GradSquares squares(grads.size());
  for (std::size_t i = 0; i < grads.size(); ++i)
    if (grads[i].defined()) squares[i] = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) *squares[chunks[i].array] += sums[i];
  return squares;
}

GradFindings findings_of(const std::vector<Param>& params, const GradSquares& squares, double loss_scale,
                         GradDetail detail) {
  GradFindings found{.loss_scale = loss_scale};
  double total = 0;
  std::optional<std::size_t> bad, largest;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!squares[i]) continue;
    found.any = true;
    const bool finite = std::isfinite(*squares[i]);
    if (!finite && !bad) bad = i;
    if (!largest || *squares[i] > *squares[*largest]) largest = i;
    total += *squares[i];
    if (detail == GradDetail::PerParam)
      found.params.push_back(
          {.name = params[i].name, .norm = std::sqrt(*squares[i]) / loss_scale, .finite = finite});
  }
  for (const Param& param : params)
    if (param.working.requires_grad() && !param.working.grad().defined())
      found.without_grad.push_back(param.name);
  found.norm = std::sqrt(total) / loss_scale;
  if (!bad && found.norm > kLargestNorm) bad = largest;
  found.finite = !bad;
  if (bad) found.first_bad = params[*bad].name;
  return found;
}

const GradFindings& GradSummary::findings() const { return on_device_ ? on_device_->read() : *findings_; }
const GradFindings& GradSummary::known() const { return on_device_ ? on_device_->known : *findings_; }

GradMultiplier GradSummary::unclipped() const { return GradMultiplier(*this); }
GradMultiplier GradSummary::clipped_to(double max_norm) const { return GradMultiplier(*this, max_norm); }

GradMultiplier::GradMultiplier(GradSummary grads, double max_norm)
    : grads_(std::move(grads)), max_norm_(max_norm) {
  HALFSTEP_CHECK(max_norm > 0, "clipped_to: max_norm is ", max_norm, ", expected a positive number.");
}

double GradMultiplier::value() const {
  if (!grads_) return factor_;
  const double unscale = factor_ / grads_->loss_scale();
  // What is clipped is what the optimizer gets: of a sum over ranks, the mean. 1e-6 as in torch's own
  // clip_grad_norm_.
  const double shrink = max_norm_ / (grads_->norm() * std::abs(factor_) + 1e-6);
  return grads_->finite() && shrink < 1.0 ? unscale * shrink : unscale;
}

GradMultiplier GradMultiplier::times(double factor) const {
  GradMultiplier multiplied = *this;
  multiplied.factor_ *= factor;
  return multiplied;
}

StepOutcome StepReport::outcome() const {
  if (!grads_.finite()) return StepOutcome::SkippedNonFinite;
  return updated_ ? StepOutcome::Stepped : StepOutcome::SkippedNoGradients;
}

const std::vector<UpdateStall>& StepReport::stalls() const {
  HALFSTEP_CHECK(stalls_,
                 "StepReport: stalls were not counted in this step. Ask for them: "
                 "optimizer.step(multiplier, {.stalls = true}).");
  return *stalls_;
}

UpdateStall StepReport::stall() const {
  UpdateStall all;
  int64_t most_lost = 0;
  for (const UpdateStall& one : stalls()) {
    all.updates += one.updates;
    all.held += one.held;
    all.lost += one.lost;
    if (one.lost <= most_lost) continue;
    most_lost = one.lost;
    all.parameter = one.parameter;
  }
  return all;
}

std::string StepReport::sentence() const {
  const auto& without = without_grad();
  switch (outcome()) {
    case StepOutcome::Stepped:
      if (without.empty()) return "stepped";
      return detail::concat("stepped; ", without.size(), without.size() == 1 ? " parameter" : " parameters",
                            " without a gradient, first ", without.front());
    case StepOutcome::SkippedNonFinite:
      return detail::concat("skipped: the gradient of ", parameter(), " is not finite at loss scale ",
                            loss_scale(),
                            micro_batch() < 0 ? "" : detail::concat(", in micro-batch ", micro_batch()),
                            rank() < 0 ? "" : detail::concat(", on rank ", rank()));
    case StepOutcome::SkippedNoGradients:
      return "skipped: no parameter of this optimizer has a gradient";
  }
  HALFSTEP_BUG("unknown step outcome ", static_cast<int>(outcome()));
}

}  // namespace halfstep
