// A parameter in low precision, and what is kept beside it so that no update is lost.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/storage.h>

#include <memory>
#include <string>
#include <vector>

namespace halfstep {

struct ParamRecord;  // Halfstep's own: what was last seen of a working copy's memory

/// One parameter of a model. A handle: copies share the tensors.
///
/// The working copy is the user's to change between steps, through any of LibTorch's doors: zero_, copy_,
/// clamp_, data(), set_data, Embedding's max_norm, torch::load. The change wins: the next step starts from a
/// master that rounds to the value that was written, and elements that were not changed keep all their bits.
/// On an accelerator two doors are shut: what data() writes beside an FP32 master is not seen, and a file of
/// another type that torch::load puts under it is refused.
struct Param {
  std::string name;     ///< as the model calls it: "layers.3.weight"
  at::Tensor working;   ///< the model's own tensor, which forward and backward use
  at::Tensor master{};  ///< what `storage` keeps beside it: FP32 master, 16-bit remainder, Kahan
                        ///< compensation; undefined where nothing is kept, without elements while the
                        ///< parameter is frozen and was never updated
  WeightStorage storage = WeightStorage::Fp32;
  /// Of the working copy; Undefined: whatever it has. A tensor of another type that is put in its place, by
  /// set_data, Module::to or torch::load, is rounded to this one with its full values as master.
  c10::ScalarType type = c10::ScalarType::Undefined;
  /// Where this is a part of a larger tensor, cut as it lies in memory: its first element there. Random bits
  /// go by a parameter's name and the place in the whole, so that cutting it into parts changes no bit.
  int64_t first_element = 0;
  std::shared_ptr<ParamRecord> record{};  ///< made with the parameter, shared by its copies
  bool loss_scaled = false;  ///< whether its gradients carry a loss scale: an optimizer must know which
  /// Where this is a part, `working` has one dimension, and this is the shape of the whole; empty where it is
  /// the whole.
  std::vector<int64_t> whole_sizes{};

  /// Whether another rank, or nobody, has the rest of it.
  bool is_part() const { return !whole_sizes.empty(); }
};

/// Takes an FP32 parameter into a storage: its values are kept beside first, and only then is the tensor
/// itself rounded to `low` (at::kBFloat16 or at::kHalf; ignored with WeightStorage::Fp32). It stays the same
/// tensor for the model and for autograd; a gradient that it has is dropped.
///
/// An Error by name for a parameter that is not FP32, not dense or not finite.
[[nodiscard]] HALFSTEP_API Param make_param(std::string name, at::Tensor parameter, WeightStorage storage,
                                            c10::ScalarType low);

/// The weight as exactly as its storage holds it, as a new FP32 tensor: what to save or to evaluate. After a
/// change of the working copy, the value from which the next step starts.
[[nodiscard]] HALFSTEP_API at::Tensor full_precision(const Param& param);

/// Writes FP32 values into working copy and master.
HALFSTEP_API void set_full_precision(const Param& param, const at::Tensor& values);

}  // namespace halfstep
