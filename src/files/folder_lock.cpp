#include "files/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "files/file_error.h"
#include "files/uninterrupted.h"

namespace halfstep::files {
namespace {

std::string holder_of(int file) {
  char text[32];
  const ssize_t count = ::pread(file, text, sizeof text, 0);
  return count > 0 ? "process " + std::string(text, static_cast<size_t>(count)) : "another process";
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / ".lock";
  file_ =
      uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644); });
  if (file_ < 0) throw_file_error("open", path);
  if (uninterrupted([&] { return ::flock(file_, LOCK_EX | LOCK_NB); }) == 0) {
    // For the message of whoever comes second; without it that message is less helpful, and all else the
    // same.
    const std::string process = std::to_string(::getpid());
    if (::ftruncate(file_, 0) == 0) (void)!::pwrite(file_, process.data(), process.size(), 0);
    return;
  }
  const int code = errno;
  const std::string holder = holder_of(file_);
  ::close(file_);
  HALFSTEP_CHECK(code != EWOULDBLOCK, folder.string(), ": ", holder,
                 " writes checkpoints into this folder. Wait for it to end, or choose another folder.");
  errno = code;
  throw_file_error("lock", path);
}

FolderLock::~FolderLock() { ::close(file_); }

}  // namespace halfstep::files
