#include "train/accumulator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <halfstep/error.h>

#include <limits>

#include "kernels/update.h"
#include "tensor/dense.h"
#include "tensor/faults.h"
#include "tensor/grads_on_device.h"

namespace halfstep::train {

void GradAccumulator::add_micro_batch(const std::vector<Param>& params, double loss_scale) {
  const at::NoGradGuard no_grad;
  const GradSummary micro_batch = halfstep::inspect_grads(params, loss_scale);
  if (micro_batch.finite()) {
    add(params);
  } else if (bad_micro_batch_ < 0) {
    bad_micro_batch_ = micro_batches_;
    bad_parameter_ = micro_batch.first_bad();
  }
  for (const Param& param : params) param.working.mutable_grad().reset();
  ++micro_batches_;
}

void GradAccumulator::add_micro_batch_on_device(const std::vector<Param>& params,
                                                const at::Tensor& loss_scale) {
  const at::NoGradGuard no_grad;
  const MemoryClassScope memory(MemoryClass::Gradient);
  on_device_.push_back(inspect_on_device(params, loss_scale, GradDetail::Total));
  sums_.resize(params.size());
  std::vector<at::Tensor> begun, to_add, begins, first;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& working = params[i].working;
    if (!working.grad().defined()) continue;
    make_sum(sums_[i], working);
    (sums_[i].begun ? begun : begins).push_back(sums_[i].values);
    (sums_[i].begun ? to_add : first).push_back(working.grad());
    sums_[i].begun = true;
  }
  if (!begins.empty()) at::_foreach_copy_(begins, first);
  if (!begun.empty()) {
    // In two operations: CUDA adds lists of one type in one launch, and lists of two tensor by tensor.
    std::vector<at::Tensor> in_fp32;
    for (const at::Tensor& sum : begun) in_fp32.push_back(at::empty_like(sum));
    at::_foreach_copy_(in_fp32, to_add);
    at::_foreach_add_(begun, in_fp32);
  }
  for (const Param& param : params) param.working.mutable_grad().reset();
  ++micro_batches_;
}

GradSummary GradAccumulator::summary_on_device(const std::vector<Param>& params, const at::Tensor& loss_scale,
                                               GradDetail detail) const {
  return inspect_on_device(params, loss_scale, detail, on_device_, first_on_device_);
}

void GradAccumulator::read_micro_batches() {
  for (const GradSummary& micro_batch : on_device_) {
    if (!micro_batch.finite() && bad_micro_batch_ < 0) {
      bad_micro_batch_ = first_on_device_;
      bad_parameter_ = micro_batch.first_bad();
    }
    ++first_on_device_;
  }
  on_device_.clear();
}

GradSummary GradAccumulator::bad_summary(double loss_scale) const {
  return GradSummary({.finite = false,
                      .any = true,
                      .norm = std::numeric_limits<double>::quiet_NaN(),
                      .loss_scale = loss_scale,
                      .first_bad = bad_parameter_,
                      .micro_batch = bad_micro_batch_});
}

void GradAccumulator::make_sum(Sum& sum, const at::Tensor& working) const {
  // As the parameter lies in memory now: somebody may have laid it out anew, even between two micro-batches.
  if (sum.values.defined() && same_layout(sum.values, working)) return;
  const MemoryClassScope memory(MemoryClass::Gradient);
  const auto options = working.options().requires_grad(false);
  const auto lay_out = [&](at::Tensor& tensor, at::ScalarType type) {
    const at::Tensor made = at::empty_like(working, options.dtype(type));
    if (sum.begun) made.copy_(tensor);
    tensor = made;
  };
  const bool kahan = kind_ == Accumulation::Bf16Kahan;
  lay_out(sum.values, kahan ? at::kBFloat16 : at::kFloat);
  if (kahan) lay_out(sum.compensation, at::kBFloat16);
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
    make_sum(sums_[i], working);
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

void GradAccumulator::close(const std::vector<Param>& params) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = params[i].working.grad();
    HALFSTEP_CHECK(!grad.defined() || (i < sums_.size() && grad.is_same(sums_[i].values)),
                   "MixedPrecision: close_sum, but '", params[i].name,
                   "' has a gradient that MixedPrecision::backward did not make, which is in no sum of "
                   "micro-batches. Call mp.backward(loss) for every loss.");
  }
  closed_ = true;
  for (std::size_t i = 0; i < sums_.size(); ++i)
    if (sums_[i].begun) params[i].working.mutable_grad() = sums_[i].values;
}

GradSummary GradAccumulator::summary(const std::vector<Param>& params, double loss_scale,
                                     GradDetail detail) const {
  const GradSummary sums = halfstep::inspect_grads(params, loss_scale, detail);
  if (bad_micro_batch_ < 0) return sums;
  return GradSummary({.finite = false,
                      .any = true,
                      .norm = sums.norm(),
                      .loss_scale = loss_scale,
                      .first_bad = bad_parameter_,
                      .micro_batch = bad_micro_batch_,
                      .params = sums.params(),
                      .without_grad = sums.without_grad()});
}

void GradAccumulator::begin_step() {
  for (Sum& sum : sums_) sum.begun = false;
  micro_batches_ = 0;
  bad_micro_batch_ = -1;
  bad_parameter_.clear();
  on_device_.clear();
  first_on_device_ = 0;
  closed_ = false;
}

StateDict GradAccumulator::live_form(const std::vector<Param>& params) const {
  StateDict saved;
  if (micro_batches_ == 0 || closed_) return saved;
  saved.set("micro_batches", micro_batches_);
  saved.set("bad_micro_batch", bad_micro_batch_);
  saved.set("bad_parameter", bad_parameter_);
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i].begun) continue;
    saved.set("sum." + params[i].name, sums_[i].values);
    if (sums_[i].compensation.defined()) saved.set("compensation." + params[i].name, sums_[i].compensation);
  }
  return saved;
}

void GradAccumulator::load(const StateDict& saved, const std::vector<Param>& params) {
  GradAccumulator loaded(kind_);
  if (saved.size() > 0) {
    loaded.micro_batches_ = loaded.first_on_device_ = saved.integer("micro_batches");
    loaded.bad_micro_batch_ = saved.integer("bad_micro_batch");
    loaded.bad_parameter_ = saved.text("bad_parameter");
    loaded.sums_.resize(params.size());
    Faults faults;
    faults.expect(loaded.micro_batches_ > 0, "'micro_batches' is ", loaded.micro_batches_,
                  ", expected a count");
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!saved.contains("sum." + params[i].name)) continue;
      Sum& sum = loaded.sums_[i];
      loaded.make_sum(sum, params[i].working);
      sum.begun = true;
      const auto take = [&](const std::string& name, at::Tensor& into) {
        faults.expect_like(name, saved.tensor(name), into);
        if (saved.tensor(name).sizes() == into.sizes()) into.copy_(saved.tensor(name));
      };
      take("sum." + params[i].name, sum.values);
      if (sum.compensation.defined()) take("compensation." + params[i].name, sum.compensation);
    }
    faults.throw_if_any("MixedPrecision, sum of micro-batches");
    // What names are left over belong to no parameter, or to another kind of accumulation.
    std::vector<std::string> names;
    for (const auto& [name, value] : loaded.live_form(params)) names.push_back(name);
    saved.expect_exactly("MixedPrecision, sum of micro-batches", {names.begin(), names.end()});
  }
  *this = std::move(loaded);
}

}  // namespace halfstep::train
