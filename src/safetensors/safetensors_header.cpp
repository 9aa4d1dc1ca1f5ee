#include "safetensors/safetensors_header.h"

#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <tuple>

#include "words/names.h"

namespace halfstep::files {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors is little-endian, and so are its bytes in memory");

constexpr uint64_t kLengthBytes = 8;

std::string_view header_text(std::span<const std::byte> file, std::string_view where,
                             const SafetensorsLimits& limits) {
  HALFSTEP_CHECK(
      file.size() >= kLengthBytes, where, ": ", file.size(),
      " bytes, too short for a safetensors file: it begins with 8 bytes that give the length of its "
      "header.");
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  HALFSTEP_CHECK(length <= file.size() - kLengthBytes, where, ": the header's length, ", length,
                 " bytes, exceeds the file, which has ", file.size() - kLengthBytes,
                 " bytes behind it. The file is cut short, or not a safetensors file.");
  HALFSTEP_CHECK(length <= limits.header_bytes, where, ": the header has ", length, " bytes; at most ",
                 limits.header_bytes, " are read. SafetensorsLimits::header_bytes raises the limit.");
  const auto* start = reinterpret_cast<const char*>(file.data() + kLengthBytes);
  const std::string_view text(start, static_cast<size_t>(length));
  HALFSTEP_CHECK(text.starts_with('{'), where,
                 ": the header does not start with '{'. Is it a safetensors file?");
  return text;
}

void sort_by_bytes(std::vector<TensorEntry>& entries) {
  const auto before = [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  };
  if (!std::is_sorted(entries.begin(), entries.end(), before))
    std::sort(entries.begin(), entries.end(), before);
}

std::vector<uint32_t> sorted_by_name(const std::vector<TensorEntry>& entries, std::string_view where) {
  std::vector<uint32_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return entries[a].name < entries[b].name; });
  const auto twice = std::adjacent_find(
      order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return entries[a].name == entries[b].name; });
  HALFSTEP_CHECK(twice == order.end(), where, ": the name ", in_quotes(entries[*twice].name),
                 " is a duplicate: two tensors have it.");
  return order;
}

void check_tiling(const std::vector<TensorEntry>& entries, uint64_t data_bytes, std::string_view where) {
  uint64_t reached = 0;
  const TensorEntry* previous = nullptr;
  for (const TensorEntry& entry : entries) {
    HALFSTEP_CHECK(entry.begin >= reached, where, ": the bytes of tensors ", in_quotes(previous->name), " [",
                   previous->begin, ", ", previous->end, ") and ", in_quotes(entry.name), " [", entry.begin,
                   ", ", entry.end, ") overlap.");
    HALFSTEP_CHECK(entry.begin == reached, where, ": a hole before tensor ", in_quotes(entry.name),
                   ": bytes [", reached, ", ", entry.begin, ") belong to no tensor.");
    reached = entry.end;
    previous = &entry;
  }
  HALFSTEP_CHECK(reached <= data_bytes, where, ": its tensors take ", reached, " bytes, but only ",
                 data_bytes, " stand behind the header. The file is cut short.");
  HALFSTEP_CHECK(reached == data_bytes, where, ": ", data_bytes - reached,
                 " trailing bytes behind the last tensor belong to none.");
}

}  // namespace

const TensorEntry* SafetensorsHeader::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name.begin(), by_name.end(), name,
                       [&](uint32_t index, std::string_view wanted) { return entries[index].name < wanted; });
  return at != by_name.end() && entries[*at].name == name ? &entries[*at] : nullptr;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view where,
                                           const SafetensorsLimits& limits) {
  const std::string_view text = header_text(file, where, limits);
  SafetensorsHeader header;
  header.data_start = kLengthBytes + text.size();
  read_header_text(text, where, limits, header);
  sort_by_bytes(header.entries);
  header.by_name = sorted_by_name(header.entries, where);
  check_tiling(header.entries, file.size() - header.data_start, where);
  return header;
}

}  // namespace halfstep::files
