// A safetensors header that is read tiles its data, and written again gives the same header.
//
// The first byte chooses: an even one, and the rest is a file; an odd one, and the rest is the text of a
// header, for which the length is made here, with the number of bytes behind it in the second ('0' is none).
// Most changes to a file break its length and are refused at once; this way they reach the parser. The byte's
// second bit asks for limits that small inputs can reach.
#include <cstring>
#include <string>

#include "fuzz/fuzz_target.h"
#include "safetensors/safetensors_header.h"

namespace halfstep {
namespace {

using files::parse_safetensors_header;
using files::SafetensorsHeader;

std::string file_around(std::string_view header_text, size_t data_bytes) {
  const uint64_t length = header_text.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header_text).append(data_bytes, '\0');
}

std::string file_of(std::string_view input) {
  if (input[0] % 2 == 0 || input.size() < 2) return std::string(input.substr(1));
  return file_around(input.substr(2), static_cast<unsigned char>(input[1] - '0') % 64);
}

bool same(const TensorEntry& a, const TensorEntry& b) {
  return a.name == b.name && a.type == b.type && a.shape == b.shape && a.begin == b.begin && a.end == b.end;
}

void check_tiling(const SafetensorsHeader& header, size_t file_bytes) {
  uint64_t reached = 0;
  for (const TensorEntry& entry : header.entries) {
    testing::require(entry.begin == reached && entry.end >= entry.begin, "entries follow one another");
    testing::require(header.find(entry.name) == &entry, "an entry is found by its name");
    reached = entry.end;
  }
  testing::require(header.data_start + reached == file_bytes, "entries end with the file");
}

void check_round_trip(const SafetensorsHeader& header, std::span<const std::byte> file) {
  const auto data = file.subspan(header.data_start);
  std::vector<TensorToWrite> tensors;
  for (const TensorEntry& entry : header.entries)
    tensors.push_back(
        {entry.name, entry.type, entry.shape, data.subspan(entry.begin, entry.end - entry.begin)});
  const std::string text = safetensors_header(tensors, header.metadata);
  testing::require(text.size() % 8 == 0, "data begins at a multiple of 8 bytes");
  const std::string again = text + std::string(data.size(), '\0');
  const SafetensorsHeader second = parse_safetensors_header(std::as_bytes(std::span(again)), "written again");
  testing::require(second.metadata == header.metadata, "metadata comes back");
  testing::require(second.entries.size() == header.entries.size(), "as many tensors come back");
  for (size_t i = 0; i < second.entries.size(); ++i)
    testing::require(same(second.entries[i], header.entries[i]), "every entry comes back");
}

}  // namespace
}  // namespace halfstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halfstep;
  if (size == 0) return 0;
  const bool tight = data[0] & 2;
  const SafetensorsLimits limits =
      tight ? SafetensorsLimits{.header_bytes = 512, .tensor_count = 3, .metadata_count = 2, .rank = 3}
            : SafetensorsLimits{};
  const std::string file = file_of(testing::text_of(data, size));
  const auto bytes = std::as_bytes(std::span(file));
  files::SafetensorsHeader header;
  bool read = false;
  testing::read_or_refuse([&] {
    header = files::parse_safetensors_header(bytes, "input", limits);
    read = true;
  });
  if (!read) return 0;
  check_tiling(header, file.size());
  check_round_trip(header, bytes);  // an Error here is a finding, and passes through
  return 0;
}
