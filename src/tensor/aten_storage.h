// Weight storages by ATen's operations alone: for devices that our kernels do not run on, and on the CPU the
// twin that the kernels are compared with. Nothing here waits for a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/storage.h>

#include <cstdint>

namespace halfstep {

/// The weight in FP32, as exactly as its storage holds it: the bits of load_weights (kernels/update.h). A new
/// tensor. `master` is undefined where the storage keeps nothing beside the working copy.
at::Tensor load_weights_by_aten(WeightStorage storage, const at::Tensor& working, const at::Tensor& master);

struct StoredWeights {
  at::Tensor working, master;  // no master where the storage keeps none
};

/// FP32 values in a storage, as new tensors: the bits of store_weights. `words` are for the storage that
/// rounds at random, from random_words; without them it rounds to nearest.
StoredWeights stored_by_aten(WeightStorage storage, at::ScalarType low, const at::Tensor& values,
                             const at::Tensor& words = {});

/// The same into tensors that are there.
void store_weights_by_aten(WeightStorage storage, const at::Tensor& values, const at::Tensor& working,
                           const at::Tensor& master);

/// `count` fair words of 32 bits, as Int. The same key and step give the same on every device; `step` is an
/// Int scalar of the device, so that a step that is taken again after a resume draws the same.
at::Tensor random_words(int64_t count, std::uint32_t key, const at::Tensor& step);

/// FP32 to BF16 or FP16, up with the probability of the part that is cut off. Of the words the low 16 bits
/// count.
at::Tensor rounded_at_random(const at::Tensor& values, at::ScalarType low, const at::Tensor& words);

}  // namespace halfstep
