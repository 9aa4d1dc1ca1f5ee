#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <system_error>

#include "safetensors/folder_names.h"
#include "words/names.h"
#include "io/mapped_file.h"
#include "safetensors/safetensors_index.h"

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
                          " tensors. Fetch the folder again, whole:");
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
    std::vector<TensorEntry> known;
    for (const auto& [known_name, place] : places) known.push_back({.name = known_name});
    throw Error(
        detail::concat(where, ": no tensor ", in_quotes(name), ".", did_you_mean(name, known)));
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
        mismatches.add(in_quotes(name), " holds ", in_quotes(entry.name),
                       ", which the index does not name");
      } else if (told->second != name) {
        mismatches.add(in_quotes(name), " holds ", in_quotes(entry.name),
                       ", which the index places in ", in_quotes(told->second));
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

}  // namespace halfstep
