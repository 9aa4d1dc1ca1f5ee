#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "io/durable_file.h"
#include "io/file_error.h"
#include "safetensors/folder_names.h"
#include "words/names.h"
#include "safetensors/safetensors_index.h"
#include "checkpoint_format/step_folders.h"

namespace halfstep {
namespace files {

std::string shard_name(size_t shard, size_t shard_count) {
  char name[80];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, shard_count);
  return name;
}

bool is_shard_name(std::string_view name) {
  size_t shard = 0, shard_count = 0;
  return std::sscanf(std::string(name).c_str(), "model-%zu-of-%zu.safetensors", &shard, &shard_count) == 2 &&
         shard > 0 && name == shard_name(shard - 1, shard_count);
}

}  // namespace files

namespace {

/// In the given order, so that layers stay together; a tensor larger than the bound has a shard of its own.
std::vector<std::vector<TensorToWrite>> split(const std::vector<TensorToWrite>& tensors,
                                              uint64_t max_shard_bytes) {
  std::vector<std::vector<TensorToWrite>> shards(1);
  uint64_t bytes = 0;
  for (const TensorToWrite& tensor : tensors) {
    if (bytes + tensor.bytes.size() > max_shard_bytes && !shards.back().empty()) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(tensor);
    bytes += tensor.bytes.size();
  }
  return shards;
}

void check_names_differ(const std::vector<TensorToWrite>& tensors) {
  std::set<std::string_view> names;
  for (const TensorToWrite& tensor : tensors)
    HALFSTEP_CHECK(names.insert(tensor.name).second, "safetensors: the name ", in_quotes(tensor.name),
                   " is a duplicate: two tensors have it.");
}

/// Refuses, before the first shard is written, an index that could not be read again.
std::string index_text_to_write(const files::SafetensorsIndex& index, uint64_t total_bytes) {
  std::string text;
  try {
    text = files::safetensors_index_text(index, total_bytes);
  } catch (const nlohmann::json::exception&) {
    throw Error("safetensors: the name of a tensor is not valid UTF-8.");
  }
  (void)files::parse_safetensors_index(text,
                                       "safetensors: the folder cannot be written, for its index could not "
                                       "be read again");
  return text;
}

/// Throws a FileError where the standard library reports a fault.
void check(const std::error_code& fault, std::string_view doing, const std::filesystem::path& path) {
  if (!fault) return;
  errno = fault.value();
  files::throw_file_error(doing, path);
}

void remove_if_there(const std::filesystem::path& path) {
  std::error_code fault;
  std::filesystem::remove(path, fault);
  check(fault, "remove", path);
}

/// What an earlier save left under the names of a folder's weights, and this one did not write.
void remove_others(const std::filesystem::path& folder, const std::set<std::string>& written) {
  std::error_code fault;
  const std::filesystem::directory_iterator files_there(folder, fault);
  check(fault, "list", folder);
  for (const auto& file : files_there) {
    const std::string name = file.path().filename().string();
    const bool ours = name == files::kIndexName || name == files::kSingleName || files::is_shard_name(name);
    if (ours && !written.contains(name)) remove_if_there(file.path());
  }
  files::sync_folder(folder);
}

}  // namespace

void write_safetensors_folder(const std::filesystem::path& folder, const std::vector<TensorToWrite>& tensors,
                              uint64_t max_shard_bytes, const std::map<std::string, std::string>& metadata) {
  check_names_differ(tensors);
  const auto shards = split(tensors, max_shard_bytes);
  files::SafetensorsIndex index;
  uint64_t total_bytes = 0;
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    for (const TensorToWrite& tensor : shards[shard]) {
      index.file_of[tensor.name] = files::shard_name(shard, shards.size());
      total_bytes += tensor.bytes.size();
    }
  }
  const std::string index_text = shards.size() == 1 ? "" : index_text_to_write(index, total_bytes);
  files::make_folders(folder);
  std::set<std::string> written;
  if (shards.size() == 1) {
    write_safetensors(folder / files::kSingleName, shards[0], metadata);
    written.emplace(files::kSingleName);
    // The reader goes by the index where there is one, so an older one goes first, and its shards after it.
    remove_if_there(folder / files::kIndexName);
    remove_others(folder, written);
    return;
  }
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const std::string name = files::shard_name(shard, shards.size());
    write_safetensors(folder / name, shards[shard], metadata);
    written.insert(name);
  }
  files::write_durably(folder / files::kIndexName, index_text);
  written.emplace(files::kIndexName);
  remove_others(folder, written);
}

}  // namespace halfstep
