#include "tensor/saved_tensors.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/detach.h>
#include <c10/core/GradMode.h>
#include <halfstep/error.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <string_view>
#include <utility>
#include <vector>

namespace halfstep {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

// Their addresses are the identities; the texts show up in LibTorch's own error messages.
constexpr std::string_view kKindName = "HALFSTEP_SAVED_TENSORS";
constexpr std::string_view kExactKindName = "HALFSTEP_EXACT_SAVED_TENSORS";

// How many scopes are alive on all threads: where there are none, saving a tensor costs one read more.
std::atomic<int> live_scopes{0};

/// One scope of the stack. Kept as LibTorch's thread-local debug info, which at::ThreadLocalState carries,
/// and which may so outlive the block that opened it.
struct ScopeInfo final : c10::DebugInfoBase {
  ScopeInfo(std::shared_ptr<SavedTensorPacker> packer, const ScopeInfo* outer)
      : packer(std::move(packer)), outer(outer) {
    live_scopes.fetch_add(1, std::memory_order_relaxed);
  }
  ~ScopeInfo() override { live_scopes.fetch_sub(1, std::memory_order_relaxed); }

  std::shared_ptr<SavedTensorPacker> packer;
  const ScopeInfo* outer;  // lives as long: the debug info of this scope holds that of the outer ones
};

c10::DebugInfoKind scope_kind() { return c10::DebugInfoKind(&kKindName); }

const ScopeInfo* innermost_scope() {
  return static_cast<const ScopeInfo*>(c10::ThreadLocalDebugInfo::get(scope_kind()));
}

bool is_parameter(const at::TensorBase& tensor) { return tensor.is_leaf() && tensor.requires_grad(); }

/// Stands where LibTorch would have kept one tensor.
class PackedHooks final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    at::Tensor kept = tensor;
    for (auto scope = innermost_scope(); scope && kept.defined() && !is_parameter(kept);
         scope = scope->outer) {
      if (auto packed = scope->packer->pack(kept)) {
        kept = std::move(packed->kept);
        restores_.push_back(std::move(packed->restore));
      }
    }
    if (!kept.defined()) return;
    // An output leads to the node that this object belongs to: held as it is, it would hold itself.
    kept_ = kept.is_leaf() ? kept : kept.detach();
    saved_version_ = kept_._version();
  }

  at::Tensor call_unpack_hook() override {
    const at::NoGradGuard no_grad;
    at::Tensor tensor = kept_;
    if (kept_.defined()) check_unchanged();
    for (auto restore = restores_.rbegin(); restore != restores_.rend(); ++restore) {
      tensor = (*restore)(tensor);
    }
    return tensor;
  }

 private:
  void check_unchanged() const {
    HALFSTEP_CHECK(kept_._version() == saved_version_, "backward needs a tensor (", kept_.scalar_type(), " ",
                   kept_.sizes(), ") that was changed in place after it was saved: it is at version ",
                   kept_._version(), ", saved at ", saved_version_,
                   ". Use the form of the operation that is not in place, or clone the tensor before.");
  }

  at::Tensor kept_;
  int64_t saved_version_ = 0;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> restores_;  // the first one belongs to the tensor
};

class PackingEngine final : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (live_scopes.load(std::memory_order_relaxed) == 0 || !innermost_scope()) return nullptr;
    return std::make_unique<PackedHooks>();
  }

  /// Never destroyed, as autograd's threads are not: they may still hold it while the process ends.
  static Engine& instance() {
    static auto* const engine = new PackingEngine;
    return *engine;
  }
};

/// Takes the place of LibTorch's own engine while the library is loaded, and gives it back when it is
/// unloaded. An engine of somebody else, such as Python's, is left where it is. (docs/decisions/0041.)
class Installation {
 public:
  Installation() {
    if (&Engine::get_default_engine() != &Engine::get_base_engine()) return;
    torch::autograd::set_default_engine_stub(&PackingEngine::instance);
    installed_ = true;
  }
  ~Installation() {
    if (installed_ && saved_tensors_can_be_packed())
      torch::autograd::set_default_engine_stub(&Engine::get_base_engine);
  }

 private:
  bool installed_ = false;
};

const Installation installation;

std::shared_ptr<ScopeInfo> checked_scope(std::shared_ptr<SavedTensorPacker> packer, const char* user) {
  HALFSTEP_CHECK(saved_tensors_can_be_packed(), user,
                 ": this process runs another autograd engine than LibTorch's own, such as Python's, and "
                 "Halfstep cannot ask it what backward keeps. Use it in a program without Python.");
  return std::make_shared<ScopeInfo>(std::move(packer), innermost_scope());
}

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer, const char* user)
    : guard_(scope_kind(), checked_scope(std::move(packer), user)) {}

bool SavedTensorScope::is_replayed() {
  if (live_scopes.load(std::memory_order_relaxed) == 0) return false;
  for (auto scope = innermost_scope(); scope; scope = scope->outer) {
    if (scope->packer->replays()) return true;
  }
  return false;
}

ExactSavedTensors::ExactSavedTensors()
    : guard_(c10::DebugInfoKind(&kExactKindName), std::make_shared<c10::DebugInfoBase>()) {}

bool ExactSavedTensors::asked_for() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind(&kExactKindName)) != nullptr;
}

StoragePlace::StoragePlace(const at::Tensor& tensor)
    : offset_(tensor.storage_offset()), sizes_(tensor.sizes().vec()), strides_(tensor.strides().vec()) {}

at::Tensor StoragePlace::in(const at::Tensor& tensor) const {
  if (tensor.sizes() == sizes_ && tensor.strides() == strides_ && tensor.storage_offset() == offset_)
    return tensor;
  return tensor.as_strided(sizes_, strides_, offset_);
}

bool share_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

bool is_parameter_or_view_of_one(const at::Tensor& tensor) {
  return is_parameter(tensor) || (tensor.is_view() && is_parameter(tensor._base()));
}

bool saved_tensors_can_be_packed() { return &Engine::get_default_engine() == &PackingEngine::instance(); }

}  // namespace halfstep
