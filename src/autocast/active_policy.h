// The policies of the innermost AutocastScopes of this thread.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <halfstep/precision.h>

#include <memory>
#include <optional>

namespace halfstep {

/// Kept as LibTorch's thread-local debug info rather than in a thread_local of ours, because
/// at::ThreadLocalState carries the former to the threads that autograd moves to under deep re-entrancy, and
/// nothing carries the latter.
struct ActivePolicy final : c10::DebugInfoBase {
  std::optional<OpPolicy> cpu;
  std::optional<OpPolicy> cuda;

  /// Null when no scope of this thread is open for the device.
  const OpPolicy* of(c10::DeviceType device) const {
    const auto& policy = device == c10::DeviceType::CUDA ? cuda : cpu;
    return policy ? &*policy : nullptr;
  }
};

c10::DebugInfoKind active_policy_kind();

/// Null outside any scope.
inline const ActivePolicy* active_policy() {
  return static_cast<const ActivePolicy*>(c10::ThreadLocalDebugInfo::get(active_policy_kind()));
}

/// What this thread has now, with the policy of one device replaced.
std::shared_ptr<ActivePolicy> active_policy_with(c10::DeviceType device, OpPolicy policy);

}  // namespace halfstep
