#include "autocast/active_policy.h"

#include <string_view>
#include <utility>

namespace halfstep {
namespace {

// Its address is the identity; the text shows up in LibTorch's own error messages.
constexpr std::string_view kKindName = "HALFSTEP_AUTOCAST_POLICY";

struct PolicyInfo final : c10::DebugInfoBase {
  explicit PolicyInfo(std::optional<ActivePolicy> policy) : policy(std::move(policy)) {}
  std::optional<ActivePolicy> policy;
};

}  // namespace

c10::DebugInfoKind active_policy_kind() { return c10::DebugInfoKind(&kKindName); }

std::shared_ptr<c10::DebugInfoBase> as_debug_info(std::optional<ActivePolicy> policy) {
  return std::make_shared<PolicyInfo>(std::move(policy));
}

const ActivePolicy* active_policy() {
  const auto* info = static_cast<const PolicyInfo*>(c10::ThreadLocalDebugInfo::get(active_policy_kind()));
  return info && info->policy ? &*info->policy : nullptr;
}

}  // namespace halfstep
