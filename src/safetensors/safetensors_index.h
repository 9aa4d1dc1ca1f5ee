// The index of a folder of shards: model.safetensors.index.json, which says in which file each tensor is.
#pragma once

#include <halfstep/safetensors.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::files {

struct SafetensorsIndex {
  std::map<std::string, std::string, std::less<>> file_of;  // tensor to shard: "weight_map"

  /// Each file once, sorted.
  std::vector<std::string> file_names() const;
};

/// Reads an index. Its file names are a stranger's: taken are only plain names of files beside the index,
/// that end in ".safetensors".
SafetensorsIndex parse_safetensors_index(std::string_view text, std::string_view where,
                                         const SafetensorsLimits& limits = {});

/// The same as text. `total_bytes` is what all tensors take together.
std::string safetensors_index_text(const SafetensorsIndex& index, uint64_t total_bytes);

inline constexpr std::string_view kIndexName = "model.safetensors.index.json";
inline constexpr std::string_view kSingleName = "model.safetensors";

/// "model-00001-of-00003.safetensors" for shard 0 of 3.
std::string shard_name(size_t shard, size_t shard_count);

/// Whether a name is one that `shard_name` gives.
bool is_shard_name(std::string_view name);

}  // namespace halfstep::files
