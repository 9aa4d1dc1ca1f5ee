#include "io/input_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/file_error.h"

namespace halfstep::files {

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // Not blocking: opening a pipe that has no writer would wait for ever, before fstat can refuse it.
  file_ =
      uninterrupted([&] { return ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); });
  HALFSTEP_CHECK(file_ >= 0 || errno != ELOOP, path_.string(), ": is a link, where a file was expected.");
  if (file_ < 0) throw_file_error("open", path_);
  struct stat status{};
  const bool known = ::fstat(file_, &status) == 0;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<uint64_t>(status.st_size);
    return;
  }
  const int code = errno;
  ::close(file_);
  errno = code;
  if (!known) throw_file_error("look at", path_);
  throw Error(path_.string() + ": is not a regular file.");
}

InputFile::~InputFile() { ::close(file_); }

void InputFile::read(uint64_t offset, std::span<std::byte> into) const {
  constexpr size_t kLargestRead = size_t{1} << 30;  // Linux moves less than 2^31 bytes a call
  while (!into.empty()) {
    const ssize_t count = uninterrupted([&] {
      return ::pread(file_, into.data(), std::min(into.size(), kLargestRead), static_cast<off_t>(offset));
    });
    if (count < 0) throw_file_error("read", path_);
    HALFSTEP_CHECK(count > 0, path_.string(), ": ends at byte ", offset, ", ", into.size(),
                   " bytes too soon.");
    into = into.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  // Not blocking: opening a pipe that has no writer would wait for ever, before fstat can refuse it.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw_file_error("open", path);
  struct stat status{};
  const bool known = ::fstat(file, &status) == 0;
  const bool regular = known && S_ISREG(status.st_mode);
  if (regular && status.st_size > 0) {
    size_ = static_cast<size_t>(status.st_size);
    void* const start = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    start_ = start == MAP_FAILED ? nullptr : static_cast<const std::byte*>(start);
  }
  const int code = errno;
  if (start_ != nullptr)
    file_ = file;  // for check_not_cut
  else
    ::close(file);
  errno = code;
  if (!known || (size_ > 0 && start_ == nullptr)) throw_file_error("map", path);
  HALFSTEP_CHECK(regular, path.string(), ": is not a regular file. Give the path of a file.");
}

MappedFile::~MappedFile() {
  if (start_ != nullptr) ::munmap(const_cast<std::byte*>(start_), size_);
  if (file_ >= 0) ::close(file_);
}

void MappedFile::check_not_cut() const {
  if (start_ == nullptr) return;
  struct stat status{};
  if (::fstat(file_, &status) != 0) throw_file_error("look at", path_);
  if (static_cast<size_t>(status.st_size) < size_)
    throw FileError(detail::concat(path_.string(), ": was cut short while it was read, from ", size_, " to ",
                                   status.st_size, " bytes. Put it back, then run the same command again."),
                    EIO);
}

}  // namespace halfstep::files
