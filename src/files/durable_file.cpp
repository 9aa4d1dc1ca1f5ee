#include "files/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

#include "files/file_error.h"
#include "files/uninterrupted.h"

namespace halfstep::files {
namespace {

// Linux moves at most 2^31 - 4096 bytes a call; smaller calls can be interrupted sooner.
constexpr size_t kLargestWrite = size_t{1} << 26;

int open_new(const std::filesystem::path& path) {
  return uninterrupted(
      [&] { return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644); });
}

// Unlike any name aside of a process that lives: ours carries the process and a count. One that is there all
// the same was left by a process that died, whose number we have now.
std::filesystem::path aside_of(const std::filesystem::path& path) {
  static std::atomic<int> count{0};
  std::filesystem::path aside = path;
  aside += ".aside-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
  ::unlink(aside.c_str());
  return aside;
}

}  // namespace

OutputFile::OutputFile(std::filesystem::path path) : path_(std::move(path)), file_(open_new(path_)) {
  if (file_ < 0) throw_file_error("create", path_);
}

OutputFile::~OutputFile() {
  if (file_ >= 0) ::close(file_);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        uninterrupted([&] { return ::write(file_, bytes.data(), std::min(bytes.size(), kLargestWrite)); });
    if (written == 0) errno = EIO;  // no progress and no error: asked again it could go on for ever
    if (written <= 0) throw_file_error("write", path_);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void OutputFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(file_, bytes.data(), std::min(bytes.size(), kLargestWrite), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_file_error("write", path_);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void OutputFile::sync() {
  if (uninterrupted([&] { return ::fsync(file_); }) != 0) throw_file_error("sync", path_);
}

void OutputFile::close() {
  // Whatever close returns, Linux has released the number; closing again could close another's file.
  if (::close(std::exchange(file_, -1)) != 0 && errno != EINTR) throw_file_error("close", path_);
}

DurableFile::DurableFile(const std::filesystem::path& path) : path_(path), file_(aside_of(path)) {}

DurableFile::~DurableFile() {
  if (!renamed_) ::unlink(file_.path().c_str());
}

void DurableFile::commit() {
  file_.sync();
  file_.close();
  if (::rename(file_.path().c_str(), path_.c_str()) != 0) throw_file_error("rename into place", path_);
  renamed_ = true;
  sync_folder(folder_of(path_));
}

void sync_folder(const std::filesystem::path& folder) {
  const int file = uninterrupted([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (file < 0) throw_file_error("open the folder", folder);
  const int result = uninterrupted([&] { return ::fsync(file); });
  const int code = errno;
  ::close(file);
  errno = code;
  if (result != 0) throw_file_error("sync the folder", folder);
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace halfstep::files
