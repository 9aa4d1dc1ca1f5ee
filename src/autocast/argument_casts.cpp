#include "autocast/argument_casts.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/ScalarType.h>
#include <halfstep/memory.h>

#include <optional>

#include "tensor/saved_tensors.h"

namespace halfstep {
namespace {

bool on_device(const at::Tensor& tensor, at::DeviceType device) {
  return device == at::kCUDA ? tensor.is_cuda() : tensor.is_cpu() || tensor.is_mkldnn();
}

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

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !at::isTensorSubclassLike(tensor) &&
         !tensor._fw_grad(/*level=*/0).defined();
}

}  // namespace halfstep
