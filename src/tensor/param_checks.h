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

/// make_param for a parameter that has passed check_can_be_param: its values are not read again.
Param make_checked_param(std::string name, at::Tensor parameter, WeightStorage storage, c10::ScalarType low);

/// The type of what a storage keeps beside a working copy of type `low`; nothing where nothing is kept.
std::optional<c10::ScalarType> master_type(WeightStorage storage, c10::ScalarType low);

/// That FP32 values are finite and stay so in `type`; an Error with the largest one.
void check_values_fit(const std::string& name, const at::Tensor& values, c10::ScalarType type);

/// Two tensors in the same memory would each undo what is written through the other: an Error by both names.
/// `whose` begins the message.
struct NamedTensor {
  const std::string* name;
  const at::Tensor* tensor;
};
void check_memory_apart(const char* whose, const std::vector<NamedTensor>& tensors);

}  // namespace halfstep
