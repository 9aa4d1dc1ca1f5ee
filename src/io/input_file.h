// A file that is read: by offset, or mapped into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace halfstep::files {

/// A regular file, never a link. Unlike a mapped one it may be cut short by another process while it is read:
/// that is an Error here, not a signal.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t size() const { return size_; }
  void read(uint64_t offset, std::span<std::byte> into) const;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int file_ = -1;
  uint64_t size_ = 0;
};

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
