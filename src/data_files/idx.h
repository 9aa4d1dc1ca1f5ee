// IDX, the format of MNIST and its kin: a type, a shape and the elements, often within gzip.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace halfstep::files {

/// The type codes of the format.
enum class IdxType : uint8_t { U8 = 0x08, I8 = 0x09, I16 = 0x0B, I32 = 0x0C, F32 = 0x0D, F64 = 0x0E };

size_t bytes_of(IdxType type);

struct IdxArray {
  IdxType type{};
  std::vector<int64_t> shape;
  std::vector<std::byte> elements;  ///< row by row, in this machine's order of bytes
};

/// Reads an IDX file, compressed with gzip or not. Refuses a header that does not fit the data, before memory
/// is taken for it.
IdxArray read_idx(const std::filesystem::path& path);
IdxArray parse_idx(std::span<const std::byte> file, const std::string& where);

}  // namespace halfstep::files
