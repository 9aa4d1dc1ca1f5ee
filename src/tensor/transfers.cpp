#include "tensor/transfers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace halfstep {
namespace {

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true).requires_grad(false));
}

}  // namespace

Arrival::Arrival(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu()) {
      on_host_.push_back(tensor.detach().clone());
      continue;
    }
    on_host_.push_back(pinned_like(tensor));
    on_host_.back().copy_(tensor, /*non_blocking=*/true);
    sent_.try_emplace(tensor.device(), tensor.device().type());
  }
  for (auto& [device, event] : sent_)
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

bool Arrival::arrived() const {
  for (const auto& [device, event] : sent_)
    if (!event.query()) return false;
  return true;
}

const at::Tensor& Arrival::wait_for(std::size_t i) const {
  for (auto& [device, event] : sent_)
    if (!event.query()) event.synchronize();
  sent_.clear();
  return on_host_[i];
}

StateDict on_host(const StateDict& live) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, value] : live)
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) tensors.push_back(*tensor);
  const Arrival arrival(tensors);
  StateDict kept;
  std::size_t i = 0;
  for (const auto& [name, value] : live)
    if (std::holds_alternative<at::Tensor>(value))
      kept.set(name, arrival.wait_for(i++));
    else
      kept.set(name, value);
  return kept;
}

at::Tensor sent_to(at::Device device, const at::Tensor& tensor) {
  if (tensor.device() == device) return tensor;
  if (!tensor.is_cpu() || device.is_cpu()) return tensor.to(device);
  return pinned_like(tensor).copy_(tensor).to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

}  // namespace halfstep
