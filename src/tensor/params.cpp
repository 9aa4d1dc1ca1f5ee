#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/params.h>

#include <cmath>

#include "kernels/update.h"
#include "tensor/dense.h"
#include "tensor/param_checks.h"

namespace halfstep {
namespace {

/// Without its master a weight is its working copy, rounded to nearest.
UpdateLayout layout_of(const Param& param) {
  return {.working = *training_format(param.working.scalar_type()),
          .weights = has_master(param) ? param.storage : WeightStorage::Nearest};
}

void* master_data(const Param& param) {
  return param.master.defined() && has_master(param) ? param.master.mutable_data_ptr() : nullptr;
}

std::size_t master_element_bytes(const Param& param) {
  return param.master.defined() ? param.master.element_size() : 0;
}

void write_values(const Param& param, const at::Tensor& dense_values) {
  const UpdateLayout layout = layout_of(param);
  const auto* values = dense_values.const_data_ptr<float>();
  const auto chunks = chunks_of({dense_values.numel()});
  void* const working = param.working.mutable_data_ptr();
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const auto [array, first, count] = chunks[i];
    store_weights(layout, values + first, address_of(working, first, param.working.element_size()),
                  address_of(master_data(param), first, master_element_bytes(param)), count);
  });
}

}  // namespace

std::optional<c10::ScalarType> master_type(WeightStorage storage, c10::ScalarType low) {
  switch (storage) {
    case WeightStorage::Fp32Master:
      return at::kFloat;
    case WeightStorage::SplitMaster:
      return at::kShort;
    case WeightStorage::Kahan:
      return low;
    default:
      return std::nullopt;
  }
}

Param make_param(std::string name, at::Tensor parameter, WeightStorage storage, c10::ScalarType low) {
  check_can_be_param(name, parameter, storage, low);
  return make_checked_param(std::move(name), std::move(parameter), storage, low);
}

bool has_master(const Param& param) {
  return !param.master.defined() || param.master.numel() == param.working.numel();
}

void give_master(const Param& param) {
  if (has_master(param)) return;
  const at::NoGradGuard no_grad;
  const MemoryClassScope memory(MemoryClass::Master);
  param.master.set_data(at::empty_like(
      param.working, param.working.options().dtype(param.master.scalar_type()).requires_grad(false)));
  if (param.storage == WeightStorage::Fp32Master)
    param.master.copy_(param.working);
  else
    param.master.zero_();
}

void drop_master(const Param& param) {
  if (param.master.defined()) param.master.set_data(at::empty({0}, param.master.options()));
}

Param make_checked_param(std::string name, at::Tensor parameter, WeightStorage storage, c10::ScalarType low,
                         bool with_master) {
  const at::NoGradGuard no_grad;
  Param param{.name = std::move(name), .working = std::move(parameter), .storage = storage};
  param.working.mutable_grad().reset();
  if (storage == WeightStorage::Fp32) {
    tag_memory(param.working, MemoryClass::Working);
    return param;
  }

  const at::Tensor full = param.working.detach();  // shares the FP32 values, which set_data does not touch
  if (const auto type = master_type(storage, low)) {
    const MemoryClassScope memory(MemoryClass::Master);
    const auto options = full.options().dtype(*type);
    param.master = with_master ? at::empty_like(full, options) : at::empty({0}, options);
  }
  {
    const MemoryClassScope memory(MemoryClass::Working);
    param.working.set_data(at::empty_like(full, full.options().dtype(low)));
  }
  write_values(param, full);
  return param;
}

at::Tensor full_precision(const Param& param) {
  const at::NoGradGuard no_grad;
  at::Tensor values =
      at::empty_like(param.working, param.working.options().dtype(at::kFloat).requires_grad(false));
  const UpdateLayout layout = layout_of(param);
  const auto chunks = chunks_of({values.numel()});
  auto* const out = values.mutable_data_ptr<float>();
  const void* const working = param.working.const_data_ptr();
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const auto [array, first, count] = chunks[i];
    load_weights(layout, address_of(working, first, param.working.element_size()),
                 address_of(master_data(param), first, master_element_bytes(param)), out + first, count);
  });
  return values;
}

void set_full_precision(const Param& param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  HALFSTEP_CHECK(values.sizes() == param.working.sizes() && values.scalar_type() == at::kFloat &&
                     values.device().is_cpu(),
                 "parameter '", param.name, "' has shape ", param.working.sizes(),
                 " and takes Float values on the CPU; given were ", values.scalar_type(), " of shape ",
                 values.sizes(), " on ", values.device(), ".");
  const at::Tensor dense =
      at::empty_like(param.working, param.working.options().dtype(at::kFloat).requires_grad(false))
          .copy_(values);
  check_values_fit(param.name, dense, param.working.scalar_type());
  write_values(param, dense);
  param.working.unsafeGetTensorImpl()->bump_version();
}

}  // namespace halfstep
