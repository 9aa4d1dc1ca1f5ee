#include "checkpoint/snapshot.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <halfstep/error.h>
#include <halfstep/tensor_file.h>

#include "tensor/faults.h"

namespace halfstep::checkpoint {
namespace {

/// Why a tensor cannot be saved, as the end of a sentence; "" if it can.
std::string obstacle(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is undefined";
  if (tensor.layout() != at::kStrided)
    return detail::concat("has the layout ", tensor.layout(), "; make it dense first");
  if (tensor.is_meta()) return "has no data: it is on the meta device";
  try {
    (void)tensor_type_of(tensor.scalar_type());
  } catch (const Error&) {
    return detail::concat("is of type ", tensor.scalar_type(), ", which safetensors files do not have");
  }
  return "";
}

/// Memory that somebody lent to LibTorch (at::from_blob) has no allocator: its owner may write to it still.
bool held_by_nobody_else(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().allocator() != nullptr;
}

/// Row by row on the CPU, in memory that nobody writes to.
at::Tensor bytes_of(const at::Tensor& tensor, Copies copies) {
  const at::NoGradGuard no_grad;
  const bool own = copies == Copies::WhereNeeded || held_by_nobody_else(tensor);
  const at::Tensor rows = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  return own || rows.const_data_ptr() != tensor.const_data_ptr() ? rows : rows.clone();
}

/// Kept where they say more than the shape does: elements without gaps, but in another order.
std::vector<int64_t> strides_of(const at::Tensor& tensor) {
  const bool reordered =
      tensor.numel() > 0 && !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense();
  return reordered ? tensor.strides().vec() : std::vector<int64_t>{};
}

}  // namespace

Snapshot snapshot_of(const Checkpoint& checkpoint, Copies copies) {
  Faults faults;
  for (const auto& [part, state] : checkpoint.parts)
    for (const auto& [name, value] : state)
      if (const auto* tensor = std::get_if<at::Tensor>(&value))
        faults.expect(obstacle(*tensor).empty(), "'", name, "' of part '", part, "' ", obstacle(*tensor));
  faults.throw_if_any("checkpoint");

  Snapshot snapshot;
  snapshot.content.step = checkpoint.step;
  snapshot.content.healthy = checkpoint.healthy;
  snapshot.content.score = checkpoint.score;
  for (const auto& [part_name, state] : checkpoint.parts) {
    files::PartToSave part{.name = part_name};
    for (const auto& [name, value] : state) {
      if (const auto* number = std::get_if<int64_t>(&value)) {
        part.scalars.emplace(name, *number);
      } else if (const auto* real = std::get_if<double>(&value)) {
        part.scalars.emplace(name, *real);
      } else if (const auto* text = std::get_if<std::string>(&value)) {
        part.scalars.emplace(name, *text);
      } else {
        const auto& tensor = std::get<at::Tensor>(value);
        snapshot.tensors.push_back(bytes_of(tensor, copies));
        snapshot.tensor_bytes += snapshot.tensors.back().nbytes();
        part.tensors.push_back({to_write(name, snapshot.tensors.back()), strides_of(tensor)});
      }
    }
    snapshot.content.parts.push_back(std::move(part));
  }
  return snapshot;
}

}  // namespace halfstep::checkpoint
