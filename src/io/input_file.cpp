#include "io/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/file_error.h"
#include "io/uninterrupted.h"

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

}  // namespace halfstep::files
