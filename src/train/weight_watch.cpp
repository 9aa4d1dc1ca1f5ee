#include "train/weight_watch.h"

#include <halfstep/error.h>

namespace halfstep::train {
namespace {

constexpr int64_t kMostSteps = 10;

}  // namespace

void WeightWatch::note_masters(const std::vector<Param>& params) {
  noted_versions_.assign(params.size(), 0);
  first_with_grad_ = nullptr;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].master.defined()) continue;
    noted_versions_[i] = params[i].master._version();
    if (!first_with_grad_ && params[i].working.grad().defined()) first_with_grad_ = &params[i];
  }
}

bool WeightWatch::master_updated(const std::vector<Param>& params) const {
  for (std::size_t i = 0; i < noted_versions_.size(); ++i)
    if (params[i].master.defined() && params[i].master._version() != noted_versions_[i]) return true;
  return false;
}

void WeightWatch::end_step(const std::vector<Param>& params) {
  if (!first_with_grad_) return;
  steps_without_update_ = master_updated(params) ? 0 : steps_without_update_ + 1;
  if (steps_without_update_ < kMostSteps) return;
  steps_without_update_ = 0;
  const at::ScalarType type = first_with_grad_->working.scalar_type();
  detail::throw_error(detail::concat(
      "MixedPrecision: in ", kMostSteps, " steps in a row '", first_with_grad_->name,
      "' and others had finite gradients, and no master was updated. An optimizer that does not know "
      "masters, "
      "such as torch::optim's, loses every update smaller than half a unit in the last place of ",
      type, ". Use halfstep::AdamW or halfstep::SGD over mp.params(), or keep FP32 weights: Precision::",
      type == at::kHalf ? "fp16" : "bf16", "(WeightStorage::Fp32)."));
}

}  // namespace halfstep::train
