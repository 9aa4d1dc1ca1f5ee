// safetensors files: what is in them, checked before a byte of it is used. Knows no Torch.
#pragma once

#include <halfstep/config.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// The element types of the format, by the format's own names (`to_string`), the widest last.
enum class TensorType : uint8_t {
  BOOL,
  F4,
  F6_E2M3,
  F6_E3M2,
  U8,
  I8,
  F8_E5M2,
  F8_E4M3,
  F8_E8M0,
  F8_E4M3FNUZ,
  F8_E5M2FNUZ,
  I16,
  U16,
  F16,
  BF16,
  I32,
  U32,
  F32,
  C64,
  F64,
  I64,
  U64,
};

/// The format's own name, "F8_E4M3", and the bits of one element.
HALFSTEP_API std::string_view to_string(TensorType type);
HALFSTEP_API int bits_of(TensorType type);

/// One tensor of a file: its elements are bytes [begin, end) of the data behind the header.
struct TensorEntry {
  std::string name;
  TensorType type{};
  std::vector<int64_t> shape{};
  uint64_t begin{};
  uint64_t end{};
};

/// Limits for untrusted files. A file beyond them is refused by name of the bound.
struct SafetensorsLimits {
  uint64_t header_bytes = uint64_t{16} << 20;
  uint64_t tensor_count = 1'000'000;
  uint64_t metadata_count = 10'000;
  int rank = 64;
};

/// One safetensors file, memory-mapped.
///
/// Opening checks the whole header: no overlap, no hole, no trailing bytes, no shape whose size overflows, no
/// name twice. The elements themselves are not read, but for BOOL, whose bytes must be 0 or 1 when they are
/// asked for.
class HALFSTEP_API SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path, const SafetensorsLimits& limits = {});
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  /// In the order of their bytes.
  const std::vector<TensorEntry>& entries() const;
  /// The entry of that name; an Error that offers the nearest name.
  const TensorEntry& entry(std::string_view name) const;
  bool contains(std::string_view name) const;
  /// A tensor's bytes, valid as long as this object. Files from elsewhere need not align them: copy them out
  /// before they are read as elements.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;
  /// `__metadata__`.
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A folder as Hugging Face keeps one: `model.safetensors.index.json` with the shards that it names, or where
/// there is no index, `model.safetensors`.
///
/// Opening checks every shard, and that index and shards name the same tensors; all disagreements are
/// reported at once. Only files beside the index are opened, whatever names the index gives.
class HALFSTEP_API SafetensorsFolder {
 public:
  explicit SafetensorsFolder(const std::filesystem::path& folder, const SafetensorsLimits& limits = {});
  ~SafetensorsFolder();
  SafetensorsFolder(SafetensorsFolder&&) noexcept;
  SafetensorsFolder& operator=(SafetensorsFolder&&) noexcept;

  /// The shards, sorted by file name.
  const std::vector<SafetensorsFile>& files() const;
  /// Of all tensors, sorted.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  /// The entry of that name, whichever shard holds it; an Error that offers the nearest name.
  const TensorEntry& entry(std::string_view name) const;
  /// As SafetensorsFile::bytes.
  std::span<const std::byte> bytes(std::string_view name) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A tensor to be written: `bytes` are its elements, little-endian, row by row.
struct TensorToWrite {
  std::string name;
  TensorType type{};
  std::vector<int64_t> shape{};
  std::span<const std::byte> bytes{};
};

/// The order in which `write_safetensors` lays tensors out: widest type first, so that every tensor is
/// aligned to its own elements, then by name. It is the reference's order.
HALFSTEP_API std::vector<TensorToWrite> in_file_order(std::vector<TensorToWrite> tensors);

/// The first bytes of a file that holds these tensors in this order: length, header, padding to 8 bytes.
HALFSTEP_API std::string safetensors_header(const std::vector<TensorToWrite>& tensors,
                                            const std::map<std::string, std::string>& metadata = {});

/// Writes one file, durably and whole or not at all. The same tensors and metadata give the same bytes,
/// whatever their order.
HALFSTEP_API void write_safetensors(const std::filesystem::path& path,
                                    const std::vector<TensorToWrite>& tensors,
                                    const std::map<std::string, std::string>& metadata = {});

/// Writes a folder as Hugging Face does: one `model.safetensors` where all tensors take at most
/// `max_shard_bytes`, otherwise shards filled in the order given, and an index, written last. Weights of an
/// earlier save under those names are replaced. Each file is whole or not there at all; the folder as one is
/// not safe against a crash while an earlier save is being replaced.
HALFSTEP_API void write_safetensors_folder(const std::filesystem::path& folder,
                                           const std::vector<TensorToWrite>& tensors,
                                           uint64_t max_shard_bytes = 5'000'000'000,
                                           const std::map<std::string, std::string>& metadata = {
                                               {"format", "pt"}});

}  // namespace halfstep
