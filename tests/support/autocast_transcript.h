// What autocast does, written down so that two processes can be compared: one line an operation or model,
// with the type and the bits of everything that came out of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace halfstep::testing {

/// Opens a region with that low type; it ends with the last reference.
using OpenRegion = std::function<std::shared_ptr<void>(at::ScalarType low)>;

/// Every op case with FP32, low and mixed inputs, and the small models: outputs, gradients or the error.
std::vector<std::string> autocast_transcript(const OpenRegion& open_region);

/// A stock region, as C++ users write it by hand.
OpenRegion bare_region();

}  // namespace halfstep::testing
