// The header of a safetensors file, from bytes and back: 8 bytes of length, then one JSON object.
#pragma once

#include <halfstep/safetensors.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::files {

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  // in the order of their bytes
  std::vector<uint32_t> by_name;     // the same, sorted by name: indices into `entries`
  std::map<std::string, std::string> metadata;
  uint64_t data_start = 0;  // where in the file the tensors' bytes begin

  /// Null when there is none of that name.
  const TensorEntry* find(std::string_view name) const;
};

/// Reads and checks the header at the start of `file`, which is the whole file: the entries tile the bytes
/// behind the header exactly. An Error begins with `where` and names the fault. However hostile the bytes,
/// takes at most three times the header's limit in memory.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view where,
                                           const SafetensorsLimits& limits = {});

/// Fills the header from its JSON text; the entries come in the text's order, each checked on its own.
/// What `parse_safetensors_header` stands on.
void read_header_text(std::string_view text, std::string_view where, const SafetensorsLimits& limits,
                      SafetensorsHeader& header);

}  // namespace halfstep::files
