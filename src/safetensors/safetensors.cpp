#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <algorithm>

#include "words/names.h"
#include "io/mapped_file.h"
#include "safetensors/safetensors_header.h"

namespace halfstep {

struct SafetensorsFile::State {
  State(const std::filesystem::path& path, const SafetensorsLimits& limits)
      : where(path.string()),
        file(path),
        header(files::parse_safetensors_header(file.bytes(), where, limits)) {}

  std::string where;
  files::MappedFile file;
  files::SafetensorsHeader header;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, const SafetensorsLimits& limits)
    : state_(std::make_unique<State>(path, limits)) {}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::vector<TensorEntry>& SafetensorsFile::entries() const { return state_->header.entries; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return state_->header.metadata;
}
bool SafetensorsFile::contains(std::string_view name) const { return state_->header.find(name) != nullptr; }

const TensorEntry& SafetensorsFile::entry(std::string_view name) const {
  const TensorEntry* const found = state_->header.find(name);
  HALFSTEP_CHECK(found, state_->where, ": no tensor ", in_quotes(name), ".",
                 did_you_mean(name, state_->header.entries));
  return *found;
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  const TensorEntry& ours = this->entry(entry.name);
  HALFSTEP_CHECK(ours.begin == entry.begin && ours.end == entry.end, state_->where, ": the entry of ",
                 in_quotes(entry.name), " is another file's.");
  const auto bytes = state_->file.bytes().subspan(static_cast<size_t>(state_->header.data_start + ours.begin),
                                                  static_cast<size_t>(ours.end - ours.begin));
  if (ours.type == TensorType::BOOL) {
    // A bool of another value is undefined behaviour for whoever reads it as one.
    const auto wrong =
        std::find_if(bytes.begin(), bytes.end(), [](std::byte byte) { return byte > std::byte{1}; });
    HALFSTEP_CHECK(wrong == bytes.end(), state_->where, ": tensor ", in_quotes(ours.name),
                   ": element ", wrong - bytes.begin(), " of type BOOL is ", std::to_integer<int>(*wrong),
                   ", neither 0 nor 1.");
  }
  return bytes;
}

}  // namespace halfstep
