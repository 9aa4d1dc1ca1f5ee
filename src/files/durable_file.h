// A file that appears whole, or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace halfstep::files {

/// Written aside, synced, and renamed into place by `commit`. Until then what stood under that name stays as
/// it was; without `commit` nothing of the new file is left behind. Every refusal of the operating system is
/// a FileError.
class DurableFile {
 public:
  explicit DurableFile(const std::filesystem::path& path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(std::span<const std::byte> bytes);

  /// Bytes, name and folder are on the disk when this returns.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path aside_;
  int file_ = -1;
};

/// Makes the names in a folder durable.
void sync_folder(const std::filesystem::path& folder);

}  // namespace halfstep::files
