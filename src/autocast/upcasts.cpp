#include "autocast/upcasts.h"

#include <c10/core/GradMode.h>

#include <utility>

namespace halfstep {
namespace {

class UpcastPacker final : public SavedTensorPacker {
 public:
  explicit UpcastPacker(std::vector<Upcast> upcasts) : upcasts_(std::move(upcasts)) {}

  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    for (const auto& [original, copy] : upcasts_) {
      if (tensor.scalar_type() == copy.scalar_type() && share_storage(tensor, copy)) {
        // A cast of the same original has the same strides as the first, so a view lies in it at the same
        // place.
        return PackedTensor{original, [saved = StoragePlace(tensor)](const at::Tensor& kept) {
                              return saved.in(kept.to(at::kFloat));
                            }};
      }
    }
    return std::nullopt;
  }

 private:
  std::vector<Upcast> upcasts_;
};

}  // namespace

bool original_may_stand_for(const Upcast& upcast) {
  const at::Tensor& original = upcast.original;
  if (original.layout() != at::kStrided || original.is_nested() || original.is_inference() ||
      is_parameter_or_view_of_one(original))
    return false;
  // A region that is replayed keeps nothing, and may find an input in another storage the second time.
  return SavedTensorScope::is_replayed() || original.storage().nbytes() <= upcast.copy.storage().nbytes();
}

RepeatedUpcasts::RepeatedUpcasts(std::vector<Upcast> upcasts) {
  if (upcasts.empty() || !at::GradMode::is_enabled() || !saved_tensors_can_be_packed()) return;
  std::erase_if(upcasts, [](const Upcast& upcast) { return !original_may_stand_for(upcast); });
  if (upcasts.empty()) return;
  scope_.emplace(std::make_shared<UpcastPacker>(std::move(upcasts)), "AutocastScope");
}

}  // namespace halfstep
