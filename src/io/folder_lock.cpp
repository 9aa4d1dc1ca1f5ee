#include "io/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "io/file_error.h"

namespace halfstep::files {
namespace {

std::string holder_of(int file) {
  char text[32];
  const ssize_t count = ::pread(file, text, sizeof text, 0);
  return count > 0 ? "process " + std::string(text, static_cast<size_t>(count)) : "another process";
}

bool try_lock(int file) {
  return uninterrupted([&] { return ::flock(file, LOCK_EX | LOCK_NB); }) == 0;
}

[[noreturn]] void refuse(const std::filesystem::path& folder, const std::string& holder) {
  throw Error(detail::concat(folder.string(), ": ", holder,
                             " writes into this folder. Wait for it to end, or choose another folder."));
}

}  // namespace

// Delegates, so that the destructor closes what was opened when this throws.
FolderLock::FolderLock(const std::filesystem::path& folder) : FolderLock() {
  const std::filesystem::path path = folder / ".lock";
  file_ =
      uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644); });
  if (file_ < 0) throw_file_error("open", path);
  if (!try_lock(file_)) {
    if (errno != EWOULDBLOCK) throw_file_error("lock", path);
    refuse(folder, holder_of(file_));
  }
  folder_ = uninterrupted([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (folder_ < 0) throw_file_error("open the folder", folder);
  // NFS locks no folder (EBADF, for it is not open for writing): `.lock` alone guards it there.
  if (!try_lock(folder_) && errno == EWOULDBLOCK) refuse(folder, "another process");

  // For the message of whoever comes second; without it that message is less helpful, and all else the same.
  const std::string process = std::to_string(::getpid());
  if (::ftruncate(file_, 0) == 0) (void)!::pwrite(file_, process.data(), process.size(), 0);
}

FolderLock::~FolderLock() {
  if (folder_ >= 0) ::close(folder_);
  if (file_ >= 0) ::close(file_);
}

}  // namespace halfstep::files
