#include "train/weight_watch.h"

#include <halfstep/error.h>

#include "tensor/param_checks.h"

namespace halfstep::train {
namespace {

constexpr int64_t kMostSteps = 10;

int64_t updates_of(const std::vector<Param>& params) {
  int64_t updates = 0;
  for (const Param& param : params) updates += param.record->updates;
  return updates;
}

int64_t skips_of(const std::vector<Param>& params) {
  int64_t skips = 0;
  for (const Param& param : params) skips += param.record->skips;
  return skips;
}

/// Undefined if none has one.
at::Tensor first_grad(const std::vector<Param>& params) {
  for (const Param& param : params)
    if (param.working.grad().defined()) return param.working.grad();
  return {};
}

bool is_in_need(const Param& param) {
  return param.working.grad().defined() && (param.master.defined() || param.loss_scaled || param.is_part());
}

[[noreturn]] void refuse(const Param& first, const std::string& what) {
  if (first.is_part())
    detail::throw_error(detail::concat(
        "MixedPrecision: ", what,
        " Each rank has a part of sharded weights and their gradients, of which one of torch::optim knows "
        "nothing. Use halfstep::AdamW or halfstep::SGD over mp.params()."));
  detail::throw_error(detail::concat(
      "MixedPrecision: ", what, " One of torch::optim updates ", first.working.scalar_type(),
      " weights without their masters", first.loss_scaled ? ", by gradients that carry a loss scale" : "",
      ". Use halfstep::AdamW or halfstep::SGD over mp.params(); or, for an optimizer of torch::optim, an "
      "FP32 model with AutocastScope",
      first.loss_scaled ? " and GradScaler." : ", or Precision::bf16(WeightStorage::Fp32)."));
}

}  // namespace

void WeightWatch::begin_backward(const std::vector<Param>& params) {
  // Micro-batches and several losses leave their gradients, but for a sum of our own, which takes them.
  const bool begins_a_step = !first_grad(params).defined();
  if (!uninspected_ || !begins_a_step) return;
  if (++steps_without_inspect_ < kMostSteps) return;
  steps_without_inspect_ = 0;
  refuse(*uninspected_,
         detail::concat("in ", kMostSteps, " steps in a row '", uninspected_->name,
                        "' and others had gradients that were cleared again, and inspect_grads "
                        "was not called."));
}

void WeightWatch::end_backward(const std::vector<Param>& params) {
  uninspected_ = nullptr;
  for (const Param& param : params)
    if (!uninspected_ && is_in_need(param)) uninspected_ = &param;
}

void WeightWatch::note(const std::vector<Param>& params) {
  noted_updates_ = updates_of(params);
  noted_skips_ = skips_of(params);
  uninspected_ = nullptr;
  steps_without_inspect_ = 0;
  noted_grad_ = WeakGrad(first_grad(params).getIntrusivePtr());
  first_in_need_ = nullptr;
  for (const Param& param : params)
    if (!first_in_need_ && is_in_need(param)) first_in_need_ = &param;
}

bool WeightWatch::another_step(const std::vector<Param>& params) const {
  return updates_of(params) != noted_updates_ &&
         noted_grad_ != WeakGrad(first_grad(params).getIntrusivePtr());
}

void WeightWatch::end_step(const std::vector<Param>& params) {
  if (!first_in_need_) return;
  const bool came_by = updates_of(params) != noted_updates_ || skips_of(params) != noted_skips_;
  steps_without_update_ = came_by ? 0 : steps_without_update_ + 1;
  if (steps_without_update_ < kMostSteps) return;
  steps_without_update_ = 0;
  refuse(*first_in_need_, detail::concat("in ", kMostSteps, " steps in a row '", first_in_need_->name,
                                         "' and others had gradients, and no optimizer of Halfstep "
                                         "updated them between inspect_grads and advance. If there is one, "
                                         "call advance after its step."));
}

}  // namespace halfstep::train
