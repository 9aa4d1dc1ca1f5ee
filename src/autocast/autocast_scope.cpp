#include <ATen/autocast_mode.h>
#include <halfstep/autocast.h>

#include "autocast/active_policy.h"
#include "autocast/policy_kernel.h"
#include "autocast/type_gate.h"

namespace halfstep {
namespace {

std::shared_ptr<ActivePolicy> checked_policy(c10::ScalarType low, OpPolicy policy,
                                             const AutocastOptions& options) {
  check_may_open(low, options, machine_for_autocast(options.device));
  check_every_row_has_its_kernel();
  return active_policy_with(options.device, std::move(policy));
}

}  // namespace

AutocastScope::AutocastScope(c10::ScalarType low, OpPolicy policy, AutocastOptions options)
    : policy_guard_(active_policy_kind(), checked_policy(low, std::move(policy), options)),
      device_(options.device),
      outer_enabled_(at::autocast::is_autocast_enabled(device_)),
      outer_low_(at::autocast::get_autocast_dtype(device_)),
      outer_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, low);
  at::autocast::set_autocast_cache_enabled(false);
}

AutocastScope::~AutocastScope() {
  at::autocast::set_autocast_cache_enabled(outer_cache_enabled_);
  at::autocast::set_autocast_dtype(device_, outer_low_);
  at::autocast::set_autocast_enabled(device_, outer_enabled_);
  // A bare region that was opened inside this scope may have filled the cache; the outermost region empties
  // it.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace halfstep
