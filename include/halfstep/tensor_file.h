// at::Tensors in safetensors files.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/safetensors.h>

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace halfstep {

/// The format's type for LibTorch's, or LibTorch's for the format's; an Error where the other side has none.
/// LibTorch 2.13 has no 6-bit types; the format has no complex numbers but C64, and none of the quantised.
HALFSTEP_API TensorType tensor_type_of(at::ScalarType type);
HALFSTEP_API at::ScalarType scalar_type_of(TensorType type);

/// The sizes that a file's tensor has in LibTorch. Only F4 differs: its elements lie in pairs, two a byte,
/// and LibTorch counts the pairs.
HALFSTEP_API std::vector<int64_t> sizes_of(const TensorEntry& entry);

/// A CPU tensor as it goes into a file. The bytes are the tensor's own: it must be contiguous, and live until
/// they are written.
HALFSTEP_API TensorToWrite to_write(std::string name, const at::Tensor& tensor);

/// One tensor to be filled with bytes of a file.
struct TensorFill {
  at::Tensor into;  ///< CPU, contiguous, exactly as many bytes
  std::span<const std::byte> bytes;
};

/// Copies all of them, shared between LibTorch's threads. Not recorded by autograd.
HALFSTEP_API void fill_tensors_(const std::vector<TensorFill>& fills);

/// Tensors, and their names in a file.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// All tensors of a file, in the order of their bytes, in memory of their own.
HALFSTEP_API NamedTensors read_tensors(const std::filesystem::path& path);

/// Writes tensors into one file, durably and whole or not at all. Tensors that are not contiguous, or not on
/// the CPU, are copied first.
HALFSTEP_API void write_tensors(const std::filesystem::path& path, const NamedTensors& tensors,
                                const std::map<std::string, std::string>& metadata = {});

}  // namespace halfstep
