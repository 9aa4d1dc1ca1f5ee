#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/params.h>

#include <cmath>
#include <optional>

#include "kernels/update.h"
#include "tensor/aten_storage.h"
#include "tensor/dense.h"
#include "tensor/param_checks.h"
#include "tensor/update_path.h"

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
  if (!kernels_serve(param.working))
    return store_weights_by_aten(layout.weights, dense_values, param.working, param.master);
  const auto* values = dense_values.const_data_ptr<float>();
  const auto chunks = chunks_of({dense_values.numel()});
  void* const working = param.working.mutable_data_ptr();
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const auto [array, first, count] = chunks[i];
    store_weights(layout, values + first, address_of(working, first, param.working.element_size()),
                  address_of(master_data(param), first, master_element_bytes(param)), count);
  });
}

at::Tensor weights_of(const Param& param) {
  const at::NoGradGuard no_grad;
  if (!kernels_serve(param.working))
    return load_weights_by_aten(layout_of(param).weights, param.working, param.master);
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

/// The type of the numbers under a working copy whose memory torch::load has put there: wider than its own
/// type says. Told from a part of a larger tensor, which may have as many bytes behind it: the storage of a
/// tensor that was read from a file has no allocator and cannot be resized (unpickler.cpp, LibTorch 2.13). On
/// an accelerator it is a copy of that, which looks like any other memory: what may be either is refused.
std::optional<at::ScalarType> wider_type_under(const Param& param) {
  const at::Tensor& working = param.working;
  const c10::Storage& memory = working.storage();
  if (!param.record || param.record->memory._unsafe_get_target() == memory.unsafeGetStorageImpl())
    return std::nullopt;
  if (working.is_cpu() && (memory.allocator() != nullptr || memory.resizable())) return std::nullopt;
  if (!working.is_cpu() && memory.use_count() > 1) return std::nullopt;  // others see a part of it too
  if (working.storage_offset() != 0 || working.numel() == 0 || !working.is_non_overlapping_and_dense())
    return std::nullopt;
  for (const at::ScalarType wider : {at::kFloat, at::kDouble}) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(wider));
    if (working.element_size() >= bytes || static_cast<int64_t>(memory.nbytes()) != working.numel() * bytes)
      continue;
    HALFSTEP_CHECK(working.is_cpu(), "parameter '", param.name, "' of type ", param.type, " on ",
                   working.device(), " was given memory of ", memory.nbytes(),
                   " bytes, twice as much as it needs or more: a part of a larger tensor, or ", wider,
                   " numbers that torch::load has put there. Give it a clone() of the part; load such a file "
                   "into a model on the CPU and take that over with set_full_precision.");
    return wider;
  }
  return std::nullopt;
}

void note_memory(const Param& param) {
  if (!param.record || param.working.is_inference()) return;
  param.record->memory = param.working.storage().getWeakStorageImpl();
  param.record->version = param.working._version();
}

/// Writes FP32 values that somebody put in the parameter's place into a working copy of its own type, and
/// into the master with all their bits. `may_be_its_own`: values that the working copy holds exactly, all of
/// them, are its own after a change of type and back, and masters that round to them stay.
void take_values(const Param& param, const at::Tensor& values, bool may_be_its_own) {
  const at::Tensor like = param.master.defined() && has_master(param) ? param.master : values;
  HALFSTEP_CHECK(values.sizes() == like.sizes(), "parameter '", param.name, "' was replaced by one of shape ",
                 values.sizes(), "; its master has ", like.sizes(),
                 ". Build a new MixedPrecision for a model of another shape.");
  const at::Tensor dense = at::empty_like(like, like.options().dtype(at::kFloat)).copy_(values);
  check_values_fit(param.name, dense, param.type);
  at::Tensor working;
  {
    const MemoryClassScope memory(MemoryClass::Working);
    working = at::empty_like(dense, dense.options().dtype(param.type)).copy_(dense);
  }
  const bool is_its_own = may_be_its_own && at::equal(working.to(at::kFloat), dense);
  param.working.set_data(working);
  if (param.storage != WeightStorage::Fp32 && !is_its_own) write_values(param, dense);
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

void take_replaced(const Param& param) {
  if (param.type == c10::ScalarType::Undefined || param.working.is_inference()) return;
  HALFSTEP_CHECK(
      !param.record || param.working.sizes() == param.record->sizes, "parameter '", param.name,
      "' has shape ", param.working.sizes(), " now; it was ", at::IntArrayRef(param.record->sizes),
      ". Masters, moments and sums of gradients have that: build a new MixedPrecision and optimizer "
      "for a model of another shape.");
  HALFSTEP_CHECK(
      !param.record || param.working.device() == param.record->device, "parameter '", param.name, "' is on ",
      param.working.device(), " now; it was on ", param.record->device,
      ", and masters, moments and sums of gradients are there. Move the model first, then build its "
      "MixedPrecision and optimizer.");
  if (param.working.scalar_type() == param.type && param.record &&
      param.record->memory._unsafe_get_target() == param.working.storage().unsafeGetStorageImpl()) {
    param.record->version = param.working._version();
    return;
  }
  const c10::InferenceMode as_for_training(false);  // what is made here outlives an evaluation
  const at::NoGradGuard no_grad;
  if (param.working.scalar_type() != param.type) {
    HALFSTEP_CHECK(param.working.is_floating_point(), "parameter '", param.name,
                   "' was replaced by one of type ", param.working.scalar_type(), "; expected ", param.type,
                   ".");
    take_values(param, param.working.detach().to(at::kFloat), /*may_be_its_own=*/true);
  } else if (const auto wider = wider_type_under(param)) {
    const at::Tensor loaded =
        at::empty({0}, param.working.options().dtype(*wider).requires_grad(false))
            .set_(param.working.storage(), 0, param.working.sizes(), param.working.strides());
    take_values(param, loaded.to(at::kFloat), /*may_be_its_own=*/false);
  }
  note_memory(param);
  if (param.record) param.record->updated_version = ParamRecord::kReplaced;
}

std::string saved_name(const std::string& name, const Param& param, int64_t elements_per_entry) {
  if (!param.is_part()) return name;
  const auto entry = [&](int64_t element) { return (element + elements_per_entry - 1) / elements_per_entry; };
  return detail::concat(name, "[", entry(param.first_element), ":",
                        entry(param.first_element + param.working.numel()), "]");
}

void note_as_part(Param& part) {
  part.record = std::make_shared<ParamRecord>();
  part.record->sizes = part.working.sizes().vec();
  part.record->device = part.working.device();
  note_memory(part);
  part.record->updated_version = part.working._version();
}

void note_update(const Param& param) {
  param.working.unsafeGetTensorImpl()->bump_version();
  if (!param.record) return;
  ++param.record->updates;
  param.record->version = param.record->updated_version = param.working._version();
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
  Param param{.name = std::move(name),
              .working = std::move(parameter),
              .storage = storage,
              .type = storage == WeightStorage::Fp32 ? at::kFloat : low,
              .record = std::make_shared<ParamRecord>()};
  param.record->sizes = param.working.sizes().vec();
  param.record->device = param.working.device();
  param.working.mutable_grad().reset();
  if (storage == WeightStorage::Fp32) {
    tag_memory(param.working, MemoryClass::Working);
    note_memory(param);
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
  note_memory(param);
  param.record->updated_version = param.working._version();
  return param;
}

at::Tensor full_precision(const Param& param) {
  take_replaced(param);
  return weights_of(param);
}

void set_full_precision(const Param& param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  take_replaced(param);
  HALFSTEP_CHECK(values.sizes() == param.working.sizes() && values.scalar_type() == at::kFloat &&
                     (values.is_cpu() || values.device() == param.working.device()),
                 "parameter '", param.name, "' has shape ", param.working.sizes(),
                 " and takes Float values on the CPU or on ", param.working.device(), "; given were ",
                 values.scalar_type(), " of shape ", values.sizes(), " on ", values.device(), ".");
  const at::Tensor dense =
      at::empty_like(param.working, param.working.options().dtype(at::kFloat).requires_grad(false))
          .copy_(values);
  check_values_fit(param.name, dense, param.working.scalar_type());
  write_values(param, dense);
  param.working.unsafeGetTensorImpl()->bump_version();
  note_memory(param);
  if (param.record) param.record->updated_version = param.working._version();
}

}  // namespace halfstep
