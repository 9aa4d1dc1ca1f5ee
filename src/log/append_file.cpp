#include "log/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "io/file_error.h"

namespace halfstep::log {

using files::throw_file_error;
using files::uninterrupted;

AppendFile::AppendFile(std::filesystem::path path, int flags) : path_(std::move(path)) {
  file_ = uninterrupted(
      [&] { return ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW | flags, 0644); });
  if (file_ < 0) throw_file_error((flags & O_CREAT) != 0 ? "create" : "open", path_);
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      size_(other.size_),
      torn_(other.torn_) {}

AppendFile::~AppendFile() {
  if (file_ >= 0) ::close(file_);
}

AppendFile AppendFile::create(std::filesystem::path path) { return {std::move(path), O_CREAT | O_EXCL}; }

AppendFile AppendFile::keep(std::filesystem::path path, uint64_t bytes) {
  AppendFile file(std::move(path), 0);
  if (uninterrupted([&] { return ::ftruncate(file.file_, static_cast<off_t>(bytes)); }) != 0)
    throw_file_error("cut", file.path_);
  file.size_ = bytes;
  return file;
}

void AppendFile::append(std::string_view record) {
  if (torn_ && uninterrupted([&] { return ::ftruncate(file_, static_cast<off_t>(size_)); }) != 0)
    throw_file_error("cut", path_);
  torn_ = false;
  std::string_view rest = record;
  while (!rest.empty()) {  // once, but for a disk that is nearly full
    const ssize_t written = uninterrupted([&] { return ::write(file_, rest.data(), rest.size()); });
    if (written > 0) {
      rest.remove_prefix(static_cast<size_t>(written));
      continue;
    }
    const int code = written == 0 ? EIO : errno;
    torn_ = rest.size() < record.size() &&
            uninterrupted([&] { return ::ftruncate(file_, static_cast<off_t>(size_)); }) != 0;
    errno = code;
    throw_file_error("write", path_);
  }
  size_ += record.size();
}

void AppendFile::sync() {
  if (uninterrupted([&] { return ::fsync(file_); }) != 0) throw_file_error("sync", path_);
}

}  // namespace halfstep::log
