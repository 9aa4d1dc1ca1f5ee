#include "train/accumulator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <halfstep/error.h>

#include "kernels/update.h"
#include "tensor/dense.h"
#include "tensor/dense_grad.h"

namespace halfstep::train {

void GradAccumulator::check_open() const {
  HALFSTEP_CHECK(!closed_,
                 "MixedPrecision: backward after inspect_grads. The sum of this step's micro-batches is "
                 "closed: step the optimizer and call advance first.");
}

void GradAccumulator::add_micro_batch(const std::vector<Param>& params, double loss_scale) {
  const at::NoGradGuard no_grad;
  const GradSummary micro_batch = halfstep::inspect_grads(params, loss_scale);
  if (micro_batch.finite) {
    add(params);
  } else if (bad_micro_batch_ < 0) {
    bad_micro_batch_ = micro_batches_;
    bad_parameter_ = micro_batch.first_bad;
  }
  for (const Param& param : params) param.working.mutable_grad().reset();
  ++micro_batches_;
}

void GradAccumulator::add(const std::vector<Param>& params) {
  const MemoryClassScope memory(MemoryClass::Gradient);
  sums_.resize(params.size());
  std::vector<at::Tensor> grads(params.size());
  std::vector<int64_t> counts(params.size(), 0);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& working = params[i].working;
    if (!working.grad().defined()) continue;
    grads[i] = grad_laid_out_as(working, working.grad());
    counts[i] = working.numel();
    if (sums_[i].values.defined()) continue;
    const auto options = working.options().requires_grad(false);
    const bool kahan = kind_ == Accumulation::Bf16Kahan;
    sums_[i].values = at::empty_like(working, options.dtype(kahan ? at::kBFloat16 : at::kFloat));
    if (kahan) sums_[i].compensation = at::empty_like(working, options.dtype(at::kBFloat16));
  }

  const auto chunks = chunks_of(counts);
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const auto [array, first, count] = chunks[i];
    const at::Tensor& grad = grads[array];
    const Format format = *training_format(grad.scalar_type());
    const void* from = address_of(grad.const_data_ptr(), first, grad.element_size());
    const Sum& sum = sums_[array];
    if (kind_ == Accumulation::Fp32)
      accumulate(format, from, sum.values.mutable_data_ptr<float>() + first, count, !sum.begun);
    else
      accumulate_kahan(format, from, static_cast<std::uint16_t*>(sum.values.mutable_data_ptr()) + first,
                       static_cast<std::uint16_t*>(sum.compensation.mutable_data_ptr()) + first, count,
                       !sum.begun);
  });
  for (std::size_t i = 0; i < params.size(); ++i) sums_[i].begun |= grads[i].defined();
}

GradSummary GradAccumulator::close(const std::vector<Param>& params, double loss_scale, GradDetail detail) {
  closed_ = true;
  for (std::size_t i = 0; i < sums_.size(); ++i)
    if (sums_[i].begun) params[i].working.mutable_grad() = sums_[i].values;
  GradSummary summary = halfstep::inspect_grads(params, loss_scale, detail);
  if (bad_micro_batch_ < 0) return summary;
  summary.any = true;
  summary.finite = false;
  summary.first_bad = bad_parameter_;
  summary.micro_batch = bad_micro_batch_;
  return summary;
}

void GradAccumulator::begin_step() {
  for (Sum& sum : sums_) sum.begun = false;
  micro_batches_ = 0;
  bad_micro_batch_ = -1;
  bad_parameter_.clear();
  closed_ = false;
}

}  // namespace halfstep::train
