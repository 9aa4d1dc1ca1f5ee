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

const c10::TensorImpl* first_grad(const std::vector<Param>& params) {
  for (const Param& param : params)
    if (param.working.grad().defined()) return param.working.grad().unsafeGetTensorImpl();
  return nullptr;
}

}  // namespace

void WeightWatch::note(const std::vector<Param>& params) {
  noted_updates_ = updates_of(params);
  noted_grad_ = first_grad(params);
  first_in_need_ = nullptr;
  for (const Param& param : params)
    if (!first_in_need_ && param.working.grad().defined() && (param.master.defined() || param.loss_scaled))
      first_in_need_ = &param;
}

bool WeightWatch::another_step(const std::vector<Param>& params) const {
  return updates_of(params) != noted_updates_ && first_grad(params) != noted_grad_;
}

void WeightWatch::end_step(const std::vector<Param>& params) {
  if (!first_in_need_) return;
  steps_without_update_ = updates_of(params) != noted_updates_ ? 0 : steps_without_update_ + 1;
  if (steps_without_update_ < kMostSteps) return;
  steps_without_update_ = 0;
  detail::throw_error(detail::concat(
      "MixedPrecision: in ", kMostSteps, " steps in a row '", first_in_need_->name,
      "' and others had finite gradients, and no optimizer of Halfstep updated them. One of torch::optim "
      "updates ",
      first_in_need_->working.scalar_type(), " weights without their masters",
      first_in_need_->loss_scaled ? ", by gradients that carry a loss scale" : "",
      ". Use halfstep::AdamW or halfstep::SGD over mp.params(); or, for an optimizer of torch::optim, an "
      "FP32 "
      "model with AutocastScope",
      first_in_need_->loss_scaled ? " and GradScaler." : ", or Precision::bf16(WeightStorage::Fp32)."));
}

}  // namespace halfstep::train
