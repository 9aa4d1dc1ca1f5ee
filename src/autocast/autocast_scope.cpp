#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <halfstep/autocast.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <string_view>
#include <utility>

#include "autocast/active_policy.h"
#include "autocast/repeated_outputs.h"
#include "autocast/type_gate.h"
#include "autocast/without_instructions.h"

namespace halfstep {
namespace {

// Its address is the identity; the text shows up in LibTorch's own error messages.
constexpr std::string_view kKindName = "HALFSTEP_AUTOCAST_POLICY";

struct PolicyInfo final : c10::DebugInfoBase {
  explicit PolicyInfo(std::optional<ActivePolicy> policy) : policy(std::move(policy)) {}
  std::optional<ActivePolicy> policy;
};

std::shared_ptr<c10::DebugInfoBase> checked_policy(c10::ScalarType low, OpPolicy policy,
                                                   const AutocastOptions& options,
                                                   std::shared_ptr<QuantSession> recipe) {
  check_can_be_low(low);
  if (low == c10::ScalarType::BFloat16 && !options.allow_emulated) check_bf16_is_native(this_machine());
  check_every_row_has_its_kernel();
  // A recipe belongs to a model's weights: a scope that is opened within its forward does not end it.
  if (const ActivePolicy* outer = active_policy(); outer && !recipe) recipe = outer->quant;
  return as_debug_info(
      ActivePolicy{.ops = std::move(policy),
                   .repeat_upcasts = options.repeat_upcasts,
                   .repeat_outputs = options.repeat_outputs,
                   .products_in_fp32 = options.products_in_fp32.value_or(!cpu_has_products_of(low)),
                   .fp32_without_instructions = !options.products_in_fp32 && !cpu_has_products_of(low),
                   .quant = std::move(recipe)});
}

}  // namespace

c10::DebugInfoKind active_policy_kind() { return c10::DebugInfoKind(&kKindName); }

std::shared_ptr<c10::DebugInfoBase> as_debug_info(std::optional<ActivePolicy> policy) {
  return std::make_shared<PolicyInfo>(std::move(policy));
}

const ActivePolicy* active_policy() {
  const auto* info = static_cast<const PolicyInfo*>(c10::ThreadLocalDebugInfo::get(active_policy_kind()));
  return info && info->policy ? &*info->policy : nullptr;
}

namespace {

/// A device of somebody else's making may have no autocast of its own: what has no row must then be handed on
/// by us. Asked for when a scope opens, because the library that brings the device may be loaded after ours.
void hand_on_what_privateuse1_has_no_row_for() {
  // Never unregistered: a static handle would outlive LibTorch's tables at the end of the process.
  [[maybe_unused]] static const auto* const registered = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;
    return dispatcher.hasBackendFallbackForDispatchKey(kKey)
               ? nullptr
               : new c10::RegistrationHandleRAII(dispatcher.registerFallback(
                     kKey, c10::KernelFunction::makeFallthrough(), "Halfstep: hands on what has no row"));
  }();
}

/// visit(device) for each that autocast_devices() has, without taking memory.
template <typename Visit>
void for_each_autocast_device(Visit visit) {
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (!c10::impl::hasDeviceGuardImpl(device)) continue;
    if (device == c10::DeviceType::PrivateUse1) hand_on_what_privateuse1_has_no_row_for();
    visit(device);
  }
}

}  // namespace

std::vector<c10::DeviceType> autocast_devices() {
  std::vector<c10::DeviceType> devices;
  for_each_autocast_device([&](c10::DeviceType device) { devices.push_back(device); });
  return devices;
}

AutocastScope::OuterRegions::OuterRegions(std::optional<c10::ScalarType> low) {
  static_assert(kMostDevices == at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size());
  for_each_autocast_device([&](c10::DeviceType device) {
    regions_[count_++] = {device, at::autocast::is_autocast_enabled(device),
                          at::autocast::get_autocast_dtype(device)};
    at::autocast::set_autocast_enabled(device, low.has_value());
    if (low) at::autocast::set_autocast_dtype(device, *low);
  });
}

AutocastScope::OuterRegions::~OuterRegions() {
  for (std::size_t i = 0; i < count_; ++i) {
    const auto& [device, was_enabled, low] = regions_[i];
    at::autocast::set_autocast_dtype(device, low);
    at::autocast::set_autocast_enabled(device, was_enabled);
  }
}

AutocastScope::AutocastScope(c10::ScalarType low, OpPolicy policy, AutocastOptions options,
                             std::shared_ptr<QuantSession> recipe)
    : AutocastScope(options.enabled ? checked_policy(low, std::move(policy), options, std::move(recipe))
                                    : as_debug_info(std::nullopt),
                    options.enabled ? std::optional(low) : std::nullopt) {}

// The policy of an outer scope is hidden, so that a bare region that opens inside is stock.
AutocastScope::AutocastScope(Disabled) : AutocastScope(as_debug_info(std::nullopt), std::nullopt) {}

AutocastScope AutocastScope::disabled() { return AutocastScope(Disabled{}); }

AutocastScope::AutocastScope(std::shared_ptr<c10::DebugInfoBase> policy, std::optional<c10::ScalarType> low)
    : policy_guard_(active_policy_kind(), std::move(policy)),
      outer_(low),
      outer_cache_enabled_(at::autocast::is_autocast_cache_enabled()),
      outer_graph_optimizer_(torch::jit::getGraphExecutorOptimize()),
      compute_(low.value_or(c10::ScalarType::Float)) {
  // TorchScript's optimizer differentiates a graph before it runs, so it knows nothing of the casts that the
  // policy makes inside an operation, and casts by a list of its own. (docs/decisions/0083.)
  // Set only where it changes: LibTorch 2.13 looks for a debug setting at each call, 100 to 200 ns.
  if (low && outer_graph_optimizer_) torch::jit::setGraphExecutorOptimize(false);
  begin_notes();
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(false);
}

AutocastScope::~AutocastScope() {
  end_notes();
  if (torch::jit::getGraphExecutorOptimize() != outer_graph_optimizer_)
    torch::jit::setGraphExecutorOptimize(outer_graph_optimizer_);
  at::autocast::set_autocast_cache_enabled(outer_cache_enabled_);
  // A bare region that was opened inside this scope may have filled the cache; the outermost region empties
  // it.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace halfstep
