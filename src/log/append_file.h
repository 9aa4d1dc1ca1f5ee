// A file that grows by whole records.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace halfstep::log {

/// Each `append` is one write at the end. If the operating system refuses it, or takes only a part, the file
/// is cut back to the record before and a FileError is thrown: a later record may then be tried again.
class AppendFile {
 public:
  /// A new file: a name that exists is refused, a link included.
  static AppendFile create(std::filesystem::path path);
  /// The first `bytes` of a file that is there; the rest is cut off.
  static AppendFile keep(std::filesystem::path path, uint64_t bytes);
  ~AppendFile();
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&&) = delete;

  void append(std::string_view record);
  void sync();
  uint64_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  AppendFile(std::filesystem::path path, int flags);

  std::filesystem::path path_;
  int file_ = -1;
  uint64_t size_ = 0;
  bool torn_ = false;  // ends with a part of a record that could not be cut off yet
};

}  // namespace halfstep::log
