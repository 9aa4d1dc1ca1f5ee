#pragma once

#include <halfstep/params.h>

namespace halfstep {

/// The Errors of make_param, without making one.
void check_can_be_param(const std::string& name, const at::Tensor& parameter, WeightStorage storage,
                        c10::ScalarType low);

}  // namespace halfstep
