// "Did you mean": the name that is nearest to one that is not there.
#pragma once

#include <halfstep/safetensors.h>

#include <string>
#include <string_view>
#include <vector>

namespace halfstep::files {

/// " Did you mean 'wte.weight'?", or "" when no name is near.
std::string did_you_mean(std::string_view wanted, const std::vector<std::string_view>& names);
std::string did_you_mean(std::string_view wanted, const std::vector<TensorEntry>& entries);

}  // namespace halfstep::files
