#include "autocast/argument_casts.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <halfstep/memory.h>

#include <memory>
#include <utility>

namespace halfstep {
namespace {

bool on_device(const at::Tensor& tensor, at::DeviceType device) { return tensor.device().type() == device; }

bool is_floating(const at::Tensor& tensor, at::DeviceType device) {
  return tensor.defined() && tensor.is_floating_point() && on_device(tensor, device);
}

bool is_unscaled(at::ScalarType type) {
  return c10::isFloat8Type(type) || type == at::ScalarType::Float4_e2m1fn_x2;
}

bool needs_cast(const at::Tensor& tensor, at::DeviceType device, at::ScalarType to) {
  return is_floating(tensor, device) && tensor.scalar_type() != to && tensor.scalar_type() != at::kDouble;
}

void look_at(const at::Tensor& tensor, std::size_t argument, at::DeviceType device,
             FloatingArguments& found) {
  if (!is_floating(tensor, device)) return;
  const at::ScalarType type = tensor.scalar_type();
  if (found.widest) found.all_alike &= type == *found.widest;
  if (is_unscaled(type)) {
    found.unscaled = {argument, type};
    if (!found.widest) found.widest = type;
    return;
  }
  found.any_fp64 |= type == at::kDouble;
  const bool widest_is_real = found.widest && !is_unscaled(*found.widest);
  found.widest = widest_is_real ? c10::promoteTypes(*found.widest, type) : type;
}

bool can_be_kept(const at::Tensor& original) {
  return original.layout() == at::kStrided && !original.is_nested() && !original.is_inference();
}

class UpcastPacker final : public SavedTensorPacker {
 public:
  explicit UpcastPacker(std::vector<Upcast> upcasts) : upcasts_(std::move(upcasts)) {}

  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    for (const auto& [original, copy] : upcasts_) {
      if (tensor.scalar_type() == copy.scalar_type() && share_storage(tensor, copy)) {
        // A cast of the same original has the same strides as the first, so a view lies in it at the same
        // place.
        return PackedTensor{original, [saved = StoragePlace(tensor)](const at::Tensor& kept) {
                              return saved.in(kept.to(at::kFloat));
                            }};
      }
    }
    return std::nullopt;
  }

 private:
  std::vector<Upcast> upcasts_;
};

}  // namespace

FloatingArguments floating_arguments(std::span<const c10::IValue> arguments, at::DeviceType device) {
  FloatingArguments found;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) {
      look_at(arguments[i].toTensor(), i, device, found);
    } else if (arguments[i].isTensorList()) {
      for (const at::Tensor& tensor : arguments[i].toTensorVector()) look_at(tensor, i, device, found);
    }
  }
  return found;
}

std::vector<Upcast> cast_arguments_(Arguments arguments, at::DeviceType device, at::ScalarType to) {
  std::vector<Upcast> upcasts;
  const auto cast = [&](const at::Tensor& tensor) {
    if (!needs_cast(tensor, device, to)) return tensor;
    std::optional<MemoryClassScope> memory;
    if (is_parameter_or_view_of_one(tensor)) memory.emplace(MemoryClass::CastCache);
    const at::Tensor copy = tensor.to(to);
    if (to == at::kFloat) upcasts.push_back({tensor, copy});
    return copy;
  };
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      if (needs_cast(argument.toTensor(), device, to)) argument = cast(argument.toTensor());
    } else if (argument.isTensorList()) {
      std::vector<at::Tensor> tensors = argument.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = cast(tensor);
      argument = std::move(tensors);
    }
  }
  return upcasts;
}

bool original_may_stand_for(const Upcast& upcast) {
  const at::Tensor& original = upcast.original;
  if (!can_be_kept(original) || is_parameter_or_view_of_one(original)) return false;
  // A region that is replayed keeps nothing, and may find an input in another storage the second time.
  return SavedTensorScope::is_replayed() || original.storage().nbytes() <= upcast.copy.storage().nbytes();
}

RepeatedUpcasts::RepeatedUpcasts(std::vector<Upcast> upcasts, bool of_low_operation) {
  if (upcasts.empty() || !at::GradMode::is_enabled() || !saved_tensors_can_be_packed()) return;
  std::erase_if(upcasts, [&](const Upcast& upcast) {
    return of_low_operation ? !can_be_kept(upcast.original) : !original_may_stand_for(upcast);
  });
  if (upcasts.empty()) return;
  scope_.emplace(std::make_shared<UpcastPacker>(std::move(upcasts)), "AutocastScope");
}

}  // namespace halfstep
