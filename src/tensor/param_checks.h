// What a tensor must be to become a parameter of ours, and the rest of the way there.
#pragma once

#include <halfstep/params.h>

#include <optional>
#include <string>
#include <vector>

namespace halfstep {

/// The Errors of make_param, without making one.
void check_can_be_param(const std::string& name, const at::Tensor& parameter, WeightStorage storage,
                        c10::ScalarType low);

/// make_param for a parameter that has passed check_can_be_param: its values are not read again. Without
/// `with_master`, for a frozen parameter, the master has no elements until give_master makes them.
Param make_checked_param(std::string name, at::Tensor parameter, WeightStorage storage, c10::ScalarType low,
                         bool with_master = true);

/// What was last seen of a parameter; its copies share one.
struct ParamRecord {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};
  std::vector<int64_t> sizes{};  // of the working copy, for good
  at::Device device = at::kCPU;  // its own too
  int64_t version = 0;           // of the working copy
  /// Of the working copy when an optimizer of ours, or we, last wrote it.
  int64_t updated_version = 0;
  static constexpr int64_t kReplaced = -1;  // somebody has put other memory in its place since
  int64_t updates = 0;                      // by optimizers of ours
  int64_t skips = 0;                        // steps that an optimizer of ours skipped
};

/// Gives a part of a parameter, whose `working` is a run of its elements, a record of its own.
void note_as_part(Param& part);

/// Notes an update by an optimizer of ours, as an in-place operation of LibTorch is noted: autograd then sees
/// that a graph has outlived its weights.
void note_update(const Param& param);

/// Takes in a working copy that was replaced by one of another type. torch::load is one such door: it puts a
/// file's memory under the parameter and leaves its type as it was (LibTorch 2.13), so that FP32 numbers are
/// read as BF16 ones.
void take_replaced(const Param& param);

/// Whether all that the storage keeps beside the working copy is there.
bool has_master(const Param& param);

/// Makes the master of a parameter that was frozen so far, from its working copy; every copy of `param` sees
/// it.
void give_master(const Param& param);

/// The other way: the working copy is all that is left of the weight.
void drop_master(const Param& param);

/// The type of what a storage keeps beside a working copy of type `low`; nothing where nothing is kept.
std::optional<c10::ScalarType> master_type(WeightStorage storage, c10::ScalarType low);

/// That FP32 values are finite and stay so in `type`; an Error with the largest one.
void check_values_fit(const std::string& name, const at::Tensor& values, c10::ScalarType type);

/// The name of something that is kept for each element of a parameter, in a saved state. Of a part it says
/// which elements: "working.layers.3.weight[0:65536]". `elements_per_entry`: of what is kept for a run of
/// them.
std::string saved_name(const std::string& name, const Param& param, int64_t elements_per_entry = 1);

/// Two tensors in the same memory would each undo what is written through the other: an Error by both names.
/// `whose` begins the message.
struct NamedTensor {
  const std::string* name;
  const at::Tensor* tensor;
};
void check_memory_apart(const char* whose, const std::vector<NamedTensor>& tensors);

}  // namespace halfstep
