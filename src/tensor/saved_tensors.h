// What autograd keeps for backward, and what it may keep instead.
//
// LibTorch 2.13 asks its engine for hooks whenever a tensor is saved. Ours, put in place while the library is
// loaded, answers with the packers of this thread: none, outside every SavedTensorScope, and then all is
// stock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <compare>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace halfstep {

/// What is kept in place of a tensor, and how the tensor comes back from it.
struct PackedTensor {
  /// Offered to the next outer packer in turn. Undefined: `restore` has all that it needs.
  at::Tensor kept;
  /// Runs at backward, with gradients off, as often as the tensor is asked for; gives the same values, type,
  /// shape and device each time.
  std::function<at::Tensor(const at::Tensor& kept)> restore;
};

/// Decides about each tensor that is saved in its scope. Parameters (leaves that require a gradient) are
/// never shown to it; views of them are.
///
/// at::ThreadLocalState carries scopes to other threads: a packer with state of its own must guard it.
class SavedTensorPacker {
 public:
  virtual ~SavedTensorPacker() = default;
  /// Nothing: keep the tensor as it is. Gradients are off during the call.
  virtual std::optional<PackedTensor> pack(const at::Tensor& tensor) = 0;
  /// Whether it runs its scope again and matches what it is shown then with what it was shown before. What
  /// was noted outside may then not change what is saved inside.
  virtual bool replays() const { return false; }
};

/// Puts a packer to work on this thread until the end of the block. Scopes nest: the innermost is asked
/// first.
///
/// While hooks are present LibTorch does not check whether a saved tensor was changed in place; here that
/// check is made on what was kept, and fails with an Error.
class SavedTensorScope {
 public:
  /// Throws an Error that names `user` where the process has another engine than LibTorch's own.
  SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer, const char* user);

  /// Whether a scope of this thread has a packer that replays.
  static bool is_replayed();

  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

/// From here to the end of the block saved tensors must come back exactly: a packer that loses digits
/// declines. For tensors whose absolute error backward magnifies, as that of logits by exp.
class ExactSavedTensors {
 public:
  ExactSavedTensors();
  static bool asked_for();

 private:
  c10::DebugInfoGuard guard_;
};

/// Where a tensor lies in its storage.
class StoragePlace {
 public:
  explicit StoragePlace(const at::Tensor& tensor);
  /// What lies there in another tensor's storage.
  at::Tensor in(const at::Tensor& tensor) const;
  auto operator<=>(const StoragePlace&) const = default;

 private:
  int64_t offset_;  // first: it tells most views apart
  std::vector<int64_t> sizes_, strides_;
};

/// Whether both lie in one storage. A sparse or an opaque tensor has none.
bool share_storage(const at::Tensor& a, const at::Tensor& b);

/// A leaf that requires a gradient, or a view of one.
bool is_parameter_or_view_of_one(const at::Tensor& tensor);

/// Whether scopes can open here: no, in a process whose autograd engine is Python's or somebody else's.
bool saved_tensors_can_be_packed();

}  // namespace halfstep
