#include "train/weight_watch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>

#include <algorithm>

#include "tensor/param_checks.h"

namespace halfstep::train {
namespace {

/// Writes FP32 values that somebody put in the parameter's place into a working copy of its own type. Where a
/// value is one that the working copy holds exactly it may be the working copy's own, read back: the master
/// stays if it rounds to it. Any other becomes the master with all its bits.
void take_values(const Param& param, at::ScalarType type, const at::Tensor& values) {
  const at::Tensor like = param.master.defined() && has_master(param) ? param.master : values;
  HALFSTEP_CHECK(values.sizes() == like.sizes(), "MixedPrecision: parameter '", param.name,
                 "' was replaced by ", "one of shape ", values.sizes(), "; its master has ", like.sizes(),
                 ". Build a new MixedPrecision for a model of another shape.");
  check_values_fit(param.name, values, type);
  at::Tensor working;
  {
    const MemoryClassScope memory(MemoryClass::Working);
    working = at::empty_like(like, like.options().dtype(type)).copy_(values);
  }
  const at::Tensor exact = working.to(at::kFloat).eq(values);
  param.working.set_data(working);
  if (param.storage != WeightStorage::Fp32)
    set_full_precision(param, at::where(exact, full_precision(param), values));
}

/// 64 elements of a BF16 or FP16 tensor, spread over it; all where it has fewer.
void sample(const at::Tensor& low, std::vector<uint16_t>& elements) {
  const auto* const codes = static_cast<const uint16_t*>(low.const_data_ptr());
  const int64_t count = std::min<int64_t>(low.numel(), 64);
  elements.resize(static_cast<std::size_t>(count));
  for (int64_t i = 0; i < count; ++i) elements[static_cast<std::size_t>(i)] = codes[i * low.numel() / count];
}

/// FP32 values under a parameter whose type still says BF16 or FP16.
at::Tensor fp32_values_under(const at::Tensor& working) {
  return at::empty({0}, working.options().dtype(at::kFloat).requires_grad(false))
      .set_(working.storage(), 0, working.sizes(), working.strides());
}

}  // namespace

WeightWatch::WeightWatch(const std::vector<Param>& params) {
  for (const Param& param : params)
    seen_.push_back({.memory = param.working.storage().getWeakStorageImpl(),
                     .type = param.working.scalar_type(),
                     .version = param.working._version()});
}

void WeightWatch::take_replaced(const std::vector<Param>& params) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& param = params[i];
    const at::Tensor& working = param.working;
    Seen& seen = seen_[i];
    if (working.storage().unsafeGetStorageImpl() == seen.memory._unsafe_get_target() &&
        working.scalar_type() == seen.type)
      continue;
    const at::NoGradGuard no_grad;
    const bool is_low = seen.type != at::kFloat;
    // Told from a view of a larger tensor by the version: set_, which torch::load uses, moves it, set_data
    // does not.
    const bool reads_fp32_as_low = working.scalar_type() == seen.type && is_low &&
                                   working._version() != seen.version && working.storage_offset() == 0 &&
                                   working.is_non_overlapping_and_dense() &&
                                   working.storage().nbytes() == working.numel() * sizeof(float);
    if (reads_fp32_as_low) {
      take_values(param, seen.type, fp32_values_under(working).clone());
    } else if (working.scalar_type() != seen.type) {
      HALFSTEP_CHECK(working.is_floating_point() && working.device().is_cpu(), "MixedPrecision: parameter '",
                     param.name, "' was replaced by one of type ", working.scalar_type(), " on ",
                     working.device(), "; expected ", seen.type, " on the CPU.");
      take_values(param, seen.type, working.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
    seen.memory = working.storage().getWeakStorageImpl();
    seen.version = working._version();
  }
}

void WeightWatch::note_weights(const std::vector<Param>& params) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].master.defined()) continue;
    seen_[i].noted_version = params[i].working._version();
    seen_[i].noted_master_version = params[i].master._version();
    sample(params[i].working, seen_[i].noted_elements);
  }
}

bool WeightWatch::master_updated(const std::vector<Param>& params) const {
  for (std::size_t i = 0; i < params.size(); ++i)
    if (params[i].master.defined() && params[i].master._version() != seen_[i].noted_master_version)
      return true;
  return false;
}

void WeightWatch::check_masters_updated(const std::vector<Param>& params) const {
  if (master_updated(params)) return;
  std::vector<uint16_t> elements;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& param = params[i];
    if (!param.master.defined() || param.working._version() != seen_[i].noted_version) continue;
    sample(param.working, elements);
    HALFSTEP_CHECK(
        elements == seen_[i].noted_elements, "MixedPrecision: '", param.name, "', which is ",
        param.working.scalar_type(), ", was updated in this step, but no master was. An optimizer ",
        "that does not know masters, such as torch::optim's, loses every update smaller than half a "
        "unit in the last place. Use halfstep::AdamW or halfstep::SGD over mp.params(), or keep FP32 "
        "weights: Precision::",
        param.working.scalar_type() == at::kHalf ? "fp16" : "bf16", "(WeightStorage::Fp32).");
  }
}

}  // namespace halfstep::train
