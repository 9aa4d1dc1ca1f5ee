#include "autocast/active_policy.h"

#include <string_view>
#include <utility>

namespace halfstep {
namespace {

// Its address is the identity; the text shows up in LibTorch's own error messages.
constexpr std::string_view kKindName = "HALFSTEP_AUTOCAST_POLICY";

}  // namespace

c10::DebugInfoKind active_policy_kind() { return c10::DebugInfoKind(&kKindName); }

std::shared_ptr<ActivePolicy> active_policy_with(c10::DeviceType device, OpPolicy policy) {
  const ActivePolicy* outer = active_policy();
  auto inner = outer ? std::make_shared<ActivePolicy>(*outer) : std::make_shared<ActivePolicy>();
  (device == c10::DeviceType::CUDA ? inner->cuda : inner->cpu) = std::move(policy);
  return inner;
}

}  // namespace halfstep
