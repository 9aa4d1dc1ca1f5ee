#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/keyed_hash.h"
#include "io/durable_file.h"
#include "io/input_file.h"
#include "safetensors/safetensors_header.h"
#include "safetensors/tensor_size.h"
#include "words/names.h"

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
  if (found) return *found;
  std::vector<std::string_view> known;
  for (const TensorEntry& entry : entries()) known.push_back(entry.name);
  throw Error(detail::concat(state_->where, ": no tensor ", in_quotes(name), ".", did_you_mean(name, known)));
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
    HALFSTEP_CHECK(wrong == bytes.end(), state_->where, ": tensor ", in_quotes(ours.name), ": element ",
                   wrong - bytes.begin(), " of type BOOL is ", std::to_integer<int>(*wrong),
                   ", neither 0 nor 1.");
  }
  return bytes;
}

namespace {

std::string json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(
        detail::concat("safetensors: the name or metadata ", in_quotes(text), " is not valid UTF-8."));
  }
}

void check_tensor(const TensorToWrite& tensor, const SafetensorsLimits& limits) {
  const std::string whose = "safetensors: tensor " + in_quotes(tensor.name);
  HALFSTEP_CHECK(!tensor.name.empty(), "safetensors: a tensor has no name.");
  HALFSTEP_CHECK(tensor.name != "__metadata__", whose, ": the format keeps that name for its metadata.");
  HALFSTEP_CHECK(tensor.name.find('\0') == std::string::npos, whose, ": the name contains a NUL.");
  HALFSTEP_CHECK(tensor.shape.size() <= static_cast<size_t>(limits.rank), whose, ": its rank ",
                 tensor.shape.size(), " exceeds ", limits.rank, ".");
  const files::TensorSize size = files::size_of_tensor(tensor.type, tensor.shape);
  HALFSTEP_CHECK(!size.fault, whose, ": its shape ", files::shape_text(tensor.shape), " of ",
                 to_string(tensor.type), " ", size.fault, ".");
  HALFSTEP_CHECK(size.bytes == tensor.bytes.size(), whose, ": its shape ", files::shape_text(tensor.shape),
                 " of ", to_string(tensor.type), " takes ", size.bytes, " bytes, but ", tensor.bytes.size(),
                 " were given.");
}

}  // namespace

std::vector<TensorToWrite> in_file_order(std::vector<TensorToWrite> tensors) {
  // TensorType is in the order of width, and the reference sorts by it; so the bytes are the same as its own.
  std::sort(tensors.begin(), tensors.end(), [](const TensorToWrite& a, const TensorToWrite& b) {
    return a.type != b.type ? a.type > b.type : a.name < b.name;
  });
  return tensors;
}

std::string safetensors_header(const std::vector<TensorToWrite>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  const SafetensorsLimits limits;  // nothing is written that would not be read again
  HALFSTEP_CHECK(tensors.size() <= limits.tensor_count, "safetensors: ", tensors.size(), " tensors; at most ",
                 limits.tensor_count, " go into one file.");
  HALFSTEP_CHECK(metadata.size() <= limits.metadata_count, "safetensors: metadata of ", metadata.size(),
                 " keys; at most ", limits.metadata_count, " go into one file.");
  std::string text(sizeof(uint64_t), '\0');
  text += '{';
  const auto separate = [&] {
    if (text.back() != '{') text += ',';
  };
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      separate();
      text.append(json_string(key)).append(":").append(json_string(value));
    }
    text += '}';
  }
  std::unordered_set<std::string_view, KeyedHash, std::equal_to<>> names;
  uint64_t begin = 0;
  for (const TensorToWrite& tensor : tensors) {
    check_tensor(tensor, limits);
    HALFSTEP_CHECK(names.insert(tensor.name).second, "safetensors: the name ", in_quotes(tensor.name),
                   " is a duplicate: two tensors have it.");
    const uint64_t end = begin + tensor.bytes.size();
    separate();
    text.append(json_string(tensor.name)).append(":{\"dtype\":\"").append(to_string(tensor.type));
    text.append("\",\"shape\":").append(nlohmann::json(tensor.shape).dump());
    text.append(",\"data_offsets\":[").append(std::to_string(begin)).append(",").append(std::to_string(end));
    text += "]}";
    begin = end;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size() - sizeof(uint64_t);
  HALFSTEP_CHECK(length <= limits.header_bytes, "safetensors: a header of ", length, " bytes; at most ",
                 limits.header_bytes, " go into one file. Write the tensors in several.");
  // By the reader itself, for what it alone counts: the length of one text, and whatever it learns to refuse.
  files::SafetensorsHeader read_again;
  files::read_header_text(std::string_view(text).substr(sizeof length),
                          "safetensors: cannot be written because it could not be read back", limits,
                          read_again);
  std::memcpy(text.data(), &length, sizeof length);
  return text;
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::vector<TensorToWrite> ordered = in_file_order(tensors);
  const std::string header = safetensors_header(ordered, metadata);
  files::DurableFile file(path);
  file.write(std::as_bytes(std::span(header)));
  for (const TensorToWrite& tensor : ordered) file.write(tensor.bytes);
  file.commit();
}

}  // namespace halfstep
