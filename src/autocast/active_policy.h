// What the innermost AutocastScope of this thread asks for, and whether there are kernels to do it.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <halfstep/op_policy.h>

#include <memory>
#include <optional>
#include <vector>

namespace halfstep {

class QuantSession;

struct ActivePolicy {
  OpPolicy ops;
  bool repeat_upcasts;  // AutocastOptions says what these two are for
  bool repeat_outputs;
  bool products_in_fp32;                  // on the CPU
  bool fp32_without_instructions;         // convolutions and recurrent layers on the CPU
  std::shared_ptr<QuantSession> quant{};  // null without a recipe
};

c10::DebugInfoKind active_policy_kind();

/// As the scope hands it to LibTorch.
///
/// Kept as LibTorch's thread-local debug info rather than in a thread_local of ours, because
/// at::ThreadLocalState carries the former to the threads that autograd moves to under deep re-entrancy, and
/// nothing carries the latter.
/// Nothing hides the policy of an outer scope.
std::shared_ptr<c10::DebugInfoBase> as_debug_info(std::optional<ActivePolicy> policy);

/// Null outside any scope.
const ActivePolicy* active_policy();

/// Device types that a scope covers: all that have an autocast key and that LibTorch can compute on in this
/// process.
std::vector<c10::DeviceType> autocast_devices();

/// Halfstep's kernels on LibTorch's autocast keys, one for each row of the table and device, are put in place
/// while the library is loaded, where nobody can catch: this tells afterwards. Throws an Error that names the
/// rows whose operation this LibTorch does not have.
void check_every_row_has_its_kernel();

}  // namespace halfstep
