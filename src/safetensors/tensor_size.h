// The types of safetensors by name, and how many bytes a shape takes.
#pragma once

#include <halfstep/safetensors.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::files {

/// The type that the format calls so.
std::optional<TensorType> type_named(std::string_view name);

/// All of them, for messages: "BOOL, F4, ...".
std::string type_names();

struct TensorSize {
  uint64_t bytes = 0;
  /// What is wrong with the shape, as the end of a sentence; null when nothing is.
  const char* fault = nullptr;
};

/// The bytes that a tensor takes, without ever overflowing on the way.
TensorSize size_of_tensor(TensorType type, const std::vector<int64_t>& shape);

/// Whether every byte is 0 or 1. A bool of another value is undefined behaviour for whoever reads it as one.
bool are_bools(std::span<const std::byte> bytes);

/// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace halfstep::files
