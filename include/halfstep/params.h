// A parameter in low precision, and what is kept beside it so that no update is lost.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/storage.h>

#include <string>

namespace halfstep {

/// One parameter of a model. A handle: copies share the tensors.
struct Param {
  std::string name;     ///< as the model calls it: "layers.3.weight"
  at::Tensor working;   ///< the model's own tensor, which forward and backward use
  at::Tensor master{};  ///< what `storage` keeps beside it: FP32 master, 16-bit remainder, Kahan
                        ///< compensation; undefined where nothing is kept
  WeightStorage storage = WeightStorage::Fp32;
};

/// Takes an FP32 parameter into a storage: its values are kept beside first, and only then is the tensor
/// itself rounded to `low` (at::kBFloat16 or at::kHalf; ignored with WeightStorage::Fp32). It stays the same
/// tensor for the model and for autograd; a gradient that it has is dropped.
///
/// An Error by name for a parameter that is not FP32, not dense, not on the CPU, or not finite.
[[nodiscard]] HALFSTEP_API Param make_param(std::string name, at::Tensor parameter, WeightStorage storage,
                                            c10::ScalarType low);

/// The weight as exactly as its storage holds it, as a new FP32 tensor: what to save or to evaluate.
[[nodiscard]] HALFSTEP_API at::Tensor full_precision(const Param& param);

/// Writes FP32 values into working copy and master.
HALFSTEP_API void set_full_precision(const Param& param, const at::Tensor& values);

}  // namespace halfstep
