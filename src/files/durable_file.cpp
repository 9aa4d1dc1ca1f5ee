#include "files/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "files/file_error.h"

namespace halfstep::files {
namespace {

// Linux moves at most 2^31 - 4096 bytes a call; smaller calls can be interrupted sooner.
constexpr size_t kLargestWrite = size_t{1} << 26;

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

DurableFile::DurableFile(const std::filesystem::path& path) : path_(path), aside_(path) {
  aside_ += ".aside";
  file_ = ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file_ < 0) throw_file_error("create", aside_);
}

DurableFile::~DurableFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(aside_.c_str());
}

void DurableFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), std::min(bytes.size(), kLargestWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_file_error("write", aside_);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void DurableFile::commit() {
  // A sync that failed must not be tried again: Linux may have dropped the dirty pages and then reports
  // success.
  if (::fsync(file_) != 0) throw_file_error("sync", aside_);
  if (::rename(aside_.c_str(), path_.c_str()) != 0) throw_file_error("rename into place", path_);
  ::close(file_);
  file_ = -1;
  sync_folder(folder_of(path_));
}

void sync_folder(const std::filesystem::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw_file_error("open the folder", folder);
  const int result = ::fsync(file);
  const int code = errno;
  ::close(file);
  errno = code;
  if (result != 0) throw_file_error("sync the folder", folder);
}

}  // namespace halfstep::files
