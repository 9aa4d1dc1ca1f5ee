// A trained model as a file of LibTorch's own, for programs without Halfstep.
#pragma once

#include <halfstep/params.h>

#include <filesystem>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace halfstep::train {

/// MixedPrecision::save_weights. `params` has every parameter of the model, and may have more.
void write_weights(const std::filesystem::path& path, torch::nn::Module& model,
                   const std::vector<Param>& params, c10::ScalarType type);
void write_weights(const std::filesystem::path& path, torch::jit::Module& model,
                   const std::vector<Param>& params, c10::ScalarType type);

}  // namespace halfstep::train
