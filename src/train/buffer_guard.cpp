#include "train/buffer_guard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

namespace halfstep::train {
namespace {

constexpr int64_t kSmallElements = 1 << 16;

}  // namespace

BufferGuard::BufferGuard(NamedBuffers buffers) : buffers_(std::move(buffers)), copies_(buffers_.size()) {}

void BufferGuard::begin_step() {
  if (step_begun_ || buffers_.empty()) return;
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
  step_begun_ = true;
}

void BufferGuard::end_step(bool skipped) {
  if (!step_begun_) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor& buffer = buffers_[i].second;
    Copy& copy = copies_[i];
    if (!copy.wanted) continue;
    // By values: LibTorch's batch norm writes to its statistics without moving their version (2.13).
    if (first_step_ && buffer.numel() > kSmallElements && at::equal(buffer, copy.values)) {
      copy = {.wanted = false};
    } else if (skipped) {
      buffer.copy_(copy.values);
    }
  }
  first_step_ = step_begun_ = false;
}

}  // namespace halfstep::train
