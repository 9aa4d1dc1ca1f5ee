// A file's bytes, mapped for reading.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace halfstep::files {

/// Maps a whole regular file. The bytes are the file's as long as nobody writes to it: a file that another
/// process cuts short while it is mapped ends the program with SIGBUS, so what Halfstep writes it replaces by
/// rename, never in place.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {start_, size_}; }

  /// A FileError if the file is shorter than it was: reading its bytes would end the program. Another process
  /// can still cut it between this and the reading.
  void check_not_cut() const;

 private:
  std::filesystem::path path_;
  int file_ = -1;
  const std::byte* start_ = nullptr;
  size_t size_ = 0;
};

}  // namespace halfstep::files
