// What Hugging Face calls the files of a model's folder.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace halfstep::files {

inline constexpr std::string_view kIndexName = "model.safetensors.index.json";
inline constexpr std::string_view kSingleName = "model.safetensors";

/// "model-00001-of-00003.safetensors" for shard 0 of 3.
std::string shard_name(size_t shard, size_t shard_count);

/// Whether a name is one that `shard_name` gives.
bool is_shard_name(std::string_view name);

}  // namespace halfstep::files
