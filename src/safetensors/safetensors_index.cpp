#include "safetensors/safetensors_index.h"

#include <halfstep/error.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/json.h"
#include "words/names.h"

namespace halfstep::files {
namespace {

// Every shard stays mapped, and Linux maps 65,530 regions a process unless told otherwise.
constexpr size_t kMostShards = 10'000;

bool is_plain_file_name(std::string_view name) {
  const auto strange = [](char letter) {
    const auto code = static_cast<unsigned char>(letter);
    return code < 0x20 || code == 0x7f || letter == '/' || letter == '\\';
  };
  return name.size() <= 255 && name.ends_with(".safetensors") && !name.starts_with('.') &&
         std::none_of(name.begin(), name.end(), strange);
}

}  // namespace

std::vector<std::string> SafetensorsIndex::file_names() const {
  std::vector<std::string> names;
  names.reserve(file_of.size());
  for (const auto& [tensor, file] : file_of) names.push_back(file);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

SafetensorsIndex parse_safetensors_index(std::string_view text, std::string_view where,
                                         const SafetensorsLimits& limits) {
  const nlohmann::json json = read_json(text, where, {.bytes = static_cast<size_t>(limits.header_bytes)});
  HALFSTEP_CHECK(json.is_object(), where, ": the index is not a JSON object.");
  const auto map = json.find("weight_map");
  HALFSTEP_CHECK(map != json.end() && map->is_object(), where,
                 ": the index has no object 'weight_map', which says in which file each tensor is.");
  HALFSTEP_CHECK(map->size() <= limits.tensor_count, where, ": ", map->size(), " tensors; at most ",
                 limits.tensor_count, " are read. SafetensorsLimits::tensor_count raises the limit.");
  SafetensorsIndex index;
  for (const auto& [tensor, file] : map->items()) {
    HALFSTEP_CHECK(file.is_string(), where, ": weight_map: the file of tensor ", in_quotes(tensor),
                   " is not a string.");
    const auto& name = file.get_ref<const std::string&>();
    HALFSTEP_CHECK(is_plain_file_name(name), where, ": weight_map: tensor ", in_quotes(tensor),
                   " is said to be in ", in_quotes(name),
                   ". Only a plain name of a file next to the index is followed, ending in .safetensors: no "
                   "folders, no control characters, at most 255 bytes.");
    index.file_of.emplace(tensor, name);
  }
  const size_t shard_count = index.file_names().size();
  HALFSTEP_CHECK(shard_count <= kMostShards, where, ": ", shard_count, " files; at most ", kMostShards,
                 " are opened.");
  return index;
}

std::string safetensors_index_text(const SafetensorsIndex& index, uint64_t total_bytes) {
  const nlohmann::json json = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", index.file_of}};
  return json.dump(2) + "\n";
}

}  // namespace halfstep::files
