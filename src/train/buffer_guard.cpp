#include "train/buffer_guard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

namespace halfstep::train {
namespace {

constexpr int64_t kSmallElements = 1 << 16;

bool all_finite(const at::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.isfinite().all().item<bool>();
}

bool has_become_non_finite(const at::Tensor& now, const at::Tensor& before) {
  return all_finite(before) && !all_finite(now);
}

}  // namespace

BufferGuard::BufferGuard(NamedBuffers buffers) : buffers_(std::move(buffers)), copies_(buffers_.size()) {
  copy_buffers();
}

void BufferGuard::begin_step() {
  if (step_begun_) return;
  copy_buffers();
  step_begun_ = true;
}

void BufferGuard::copy_buffers() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor& buffer = buffers_[i].second;
    Copy& copy = copies_[i];
    if (!copy.wanted) continue;
    if (copy.values.defined() && copy.values.sizes() == buffer.sizes() &&
        copy.values.scalar_type() == buffer.scalar_type()) {
      copy.values.copy_(buffer);
    } else {
      copy.values = buffer.detach().clone();
    }
  }
}

void BufferGuard::restart() {
  step_begun_ = abandoned_ = false;
  copy_buffers();
}

void BufferGuard::resume_step(const std::vector<at::Tensor>& at_start) {
  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (at_start[i].defined()) copies_[i] = {.values = at_start[i].clone()};
  step_begun_ = true;
}

void BufferGuard::end_step(bool skipped) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor& buffer = buffers_[i].second;
    Copy& copy = copies_[i];
    if (!copy.wanted) continue;
    // By values: LibTorch's batch norm writes to its statistics without moving their version (2.13).
    if (first_step_ && buffer.numel() > kSmallElements && at::equal(buffer, copy.values)) {
      copy = {.wanted = false};
    } else if (skipped || (abandoned_ && has_become_non_finite(buffer, copy.values))) {
      buffer.copy_(copy.values);
    }
  }
  first_step_ = false;
  restart();
}

}  // namespace halfstep::train
