#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <system_error>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "io/durable_file.h"
#include "io/file_error.h"
#include "io/input_file.h"
#include "safetensors/safetensors_index.h"
#include "words/names.h"

namespace halfstep {
namespace {

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Gathers faults; tells the first ones and the number of all.
class Mismatches {
 public:
  template <typename... Parts>
  void add(const Parts&... parts) {
    if (count_++ < kTold) text_ += detail::concat("\n  ", parts...);
  }
  void check(const std::filesystem::path& where) const {
    if (count_ > kTold)
      throw Error(detail::concat(start(where), text_, "\n  and ", count_ - kTold, " more."));
    if (count_ > 0) throw Error(start(where) + text_);
  }

 private:
  static constexpr size_t kTold = 20;
  std::string start(const std::filesystem::path& where) const {
    return detail::concat(where.string(), ": the index and its files disagree on ", count_,
                          " tensors. Download the whole folder again:");
  }
  std::string text_;
  size_t count_ = 0;
};

}  // namespace

struct SafetensorsFolder::State {
  struct Place {
    const SafetensorsFile* file;
    const TensorEntry* entry;
  };
  std::string where;
  std::vector<SafetensorsFile> files;
  std::map<std::string, Place, std::less<>> places;

  const Place& place(std::string_view name) const {
    const auto found = places.find(name);
    if (found != places.end()) return found->second;
    std::vector<std::string_view> known;
    for (const auto& [known_name, place] : places) known.push_back(known_name);
    throw Error(detail::concat(where, ": no tensor ", in_quotes(name), ".", did_you_mean(name, known)));
  }
};

SafetensorsFolder::SafetensorsFolder(const std::filesystem::path& folder, const SafetensorsLimits& limits)
    : state_(std::make_unique<State>()) {
  state_->where = folder.string();
  const auto index_path = folder / files::kIndexName, single_path = folder / files::kSingleName;
  std::error_code unreadable;  // then the file counts as absent
  const bool has_index = std::filesystem::exists(index_path, unreadable);
  HALFSTEP_CHECK(has_index || std::filesystem::exists(single_path, unreadable), folder.string(),
                 ": has neither ", files::kIndexName, " nor ", files::kSingleName, ".");
  if (!has_index) {
    const SafetensorsFile& file = state_->files.emplace_back(single_path, limits);
    for (const TensorEntry& entry : file.entries()) state_->places[entry.name] = {&file, &entry};
    return;
  }
  const files::MappedFile mapped(index_path);
  const files::SafetensorsIndex index =
      files::parse_safetensors_index(text_of(mapped.bytes()), index_path.string(), limits);
  const std::vector<std::string> names = index.file_names();
  state_->files.reserve(names.size());
  Mismatches mismatches;
  size_t held = 0;
  for (const std::string& name : names) {
    const SafetensorsFile& file = state_->files.emplace_back(folder / name, limits);
    for (const TensorEntry& entry : file.entries()) {
      const auto told = index.file_of.find(entry.name);
      if (told == index.file_of.end()) {
        mismatches.add(in_quotes(name), " holds ", in_quotes(entry.name), ", which the index does not name");
      } else if (told->second != name) {
        mismatches.add(in_quotes(name), " holds ", in_quotes(entry.name), ", which the index places in ",
                       in_quotes(told->second));
      } else {
        state_->places[entry.name] = {&file, &entry};
      }
    }
    // Then some are not named, or placed elsewhere: no need to open the files that are left, which a
    // stranger's index may have made ten thousand of one.
    held += file.entries().size();
    if (held > index.file_of.size() && state_->files.size() < names.size()) mismatches.check(index_path);
  }
  for (const auto& [tensor, file] : index.file_of)
    if (!state_->places.contains(tensor))
      mismatches.add("the index places ", in_quotes(tensor), " in ", in_quotes(file),
                     ", which does not hold it");
  mismatches.check(index_path);
}

SafetensorsFolder::~SafetensorsFolder() = default;
SafetensorsFolder::SafetensorsFolder(SafetensorsFolder&&) noexcept = default;
SafetensorsFolder& SafetensorsFolder::operator=(SafetensorsFolder&&) noexcept = default;

const std::vector<SafetensorsFile>& SafetensorsFolder::files() const { return state_->files; }
bool SafetensorsFolder::contains(std::string_view name) const { return state_->places.contains(name); }
const TensorEntry& SafetensorsFolder::entry(std::string_view name) const {
  return *state_->place(name).entry;
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : state_->places) names.push_back(name);
  return names;
}

std::span<const std::byte> SafetensorsFolder::bytes(std::string_view name) const {
  const State::Place& place = state_->place(name);
  return place.file->bytes(*place.entry);
}

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
  (void)files::parse_safetensors_index(
      text, "safetensors: the folder cannot be written because its index could not be read back");
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
