#include "autocast/upcasts.h"

#include <ATen/ops/as_strided.h>
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
        return PackedTensor{original, cast_again(tensor, copy)};
      }
    }
    return std::nullopt;
  }

 private:
  /// A cast of the same original has the same strides as the first, so a view lies in it at the same place.
  static std::function<at::Tensor(const at::Tensor&)> cast_again(const at::Tensor& tensor,
                                                                 const at::Tensor& copy) {
    if (tensor.sizes() == copy.sizes() && tensor.strides() == copy.strides()) {
      return [](const at::Tensor& original) { return original.to(at::kFloat); };
    }
    return [sizes = tensor.sizes().vec(), strides = tensor.strides().vec(),
            offset = tensor.storage_offset()](const at::Tensor& original) {
      return original.to(at::kFloat).as_strided(sizes, strides, offset);
    };
  }

  std::vector<Upcast> upcasts_;
};

}  // namespace

bool original_may_stand_for(const Upcast& upcast) {
  const at::Tensor& original = upcast.original;
  return original.layout() == at::kStrided && !original.is_inference() &&
         !is_parameter_or_view_of_one(original) &&
         original.storage().nbytes() <= upcast.copy.storage().nbytes();
}

RepeatedUpcasts::RepeatedUpcasts(std::vector<Upcast> upcasts) {
  if (upcasts.empty() || !at::GradMode::is_enabled() || !saved_tensors_can_be_packed()) return;
  std::erase_if(upcasts, [](const Upcast& upcast) { return !original_may_stand_for(upcast); });
  if (upcasts.empty()) return;
  scope_.emplace(std::make_shared<UpcastPacker>(std::move(upcasts)), "AutocastScope");
}

}  // namespace halfstep
