#include <ATen/autocast_mode.h>
#include <halfstep/autocast.h>

#include "autocast/active_policy.h"
#include "autocast/policy_kernel.h"
#include "autocast/repeated_outputs.h"
#include "autocast/type_gate.h"

namespace halfstep {
namespace {

std::shared_ptr<c10::DebugInfoBase> checked_policy(c10::ScalarType low, OpPolicy policy,
                                                   const AutocastOptions& options) {
  check_can_be_low(low);
  if (low == c10::ScalarType::BFloat16 && !options.allow_emulated) {
    static const Machine machine = inspect_machine();
    check_bf16_is_native(machine);
  }
  check_every_row_has_its_kernel();
  return as_debug_info(ActivePolicy{.ops = std::move(policy),
                                    .repeat_upcasts = options.repeat_upcasts,
                                    .repeat_outputs = options.repeat_outputs});
}

}  // namespace

AutocastScope::OuterRegion::OuterRegion(c10::DeviceType device, c10::ScalarType low)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      low_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, low);
}

AutocastScope::OuterRegion::~OuterRegion() {
  at::autocast::set_autocast_dtype(device_, low_);
  at::autocast::set_autocast_enabled(device_, was_enabled_);
}

AutocastScope::AutocastScope(c10::ScalarType low, OpPolicy policy, AutocastOptions options)
    : policy_guard_(active_policy_kind(), checked_policy(low, std::move(policy), options)),
      outer_cpu_(c10::DeviceType::CPU, low),
      outer_cuda_(c10::DeviceType::CUDA, low),
      outer_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  begin_notes();
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(false);
}

AutocastScope::~AutocastScope() {
  end_notes();
  at::autocast::set_autocast_cache_enabled(outer_cache_enabled_);
  // A bare region that was opened inside this scope may have filled the cache; the outermost region empties
  // it.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace halfstep
