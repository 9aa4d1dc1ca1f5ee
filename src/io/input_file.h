// A file read by offset, straight into the caller's memory.
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

}  // namespace halfstep::files
