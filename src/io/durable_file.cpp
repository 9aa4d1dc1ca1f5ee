#include "io/durable_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "io/file_error.h"

namespace halfstep::files {
namespace {

// Linux moves at most 2^31 - 4096 bytes a call; smaller calls can be interrupted sooner.
constexpr size_t kLargestWrite = size_t{1} << 26;

constexpr char kAside[] = ".aside-";

int open_new(const std::filesystem::path& path) {
  return uninterrupted(
      [&] { return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644); });
}

// A name aside by chance: the process's number would be another's too, in a second container on the same
// disk. One that is taken is somebody's, and stays.
OutputFile open_aside(const std::filesystem::path& path) {
  constexpr int kMostTries = 100;
  for (int i = 1;; ++i) {
    uint64_t chance = 0;
    if (::getrandom(&chance, sizeof chance, 0) != static_cast<ssize_t>(sizeof chance))
      throw_file_error("choose a name next to", path);
    char suffix[40];
    std::snprintf(suffix, sizeof suffix, "%s%016llx", kAside, static_cast<unsigned long long>(chance));
    std::filesystem::path aside = path;
    aside += suffix;
    try {
      return OutputFile(aside);
    } catch (const FileError& error) {
      if (error.code() != EEXIST || i == kMostTries) throw;
    }
  }
}

// The folder's own name is durable after this. A process that was killed between mkdir and sync has left that
// to us. A parent that we may not open, or that cannot be synced, was not made by us.
void sync_parent(const std::filesystem::path& folder) {
  std::error_code unknown;
  const std::filesystem::path resolved = std::filesystem::canonical(folder, unknown);
  if (unknown) return;
  try {
    sync_folder(folder_of(resolved));
  } catch (const FileError& error) {
    if (error.code() != EACCES && error.code() != EPERM && error.code() != EINVAL && error.code() != EROFS)
      throw;
  }
}

}  // namespace

OutputFile::OutputFile(std::filesystem::path path) : path_(std::move(path)), file_(open_new(path_)) {
  if (file_ < 0) throw_file_error("create", path_);
}

OutputFile::OutputFile(std::filesystem::path path, int file) : path_(std::move(path)), file_(file) {}

OutputFile OutputFile::into_stream(std::filesystem::path path) {
  // Appending: the standard output may be a regular file that has content. A terminal does not become ours.
  const int file =
      uninterrupted([&] { return ::open(path.c_str(), O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC); });
  if (file < 0) throw_file_error("open", path);
  return {std::move(path), file};
}

OutputFile::~OutputFile() {
  if (file_ >= 0) ::close(file_);
}

void OutputFile::fail(std::string_view doing) {
  failed_ = true;
  throw_file_error(doing, path_);
}

void OutputFile::check_whole() const {
  HALFSTEP_CHECK(
      !failed_ && file_ >= 0, path_.string(), ": ",
      failed_ ? "an earlier write or sync failed, so its content cannot be trusted" : "is closed already",
      ". Write it again from the beginning.");
}

void OutputFile::write(std::span<const std::byte> bytes) {
  check_whole();
  while (!bytes.empty()) {
    const ssize_t written =
        uninterrupted([&] { return ::write(file_, bytes.data(), std::min(bytes.size(), kLargestWrite)); });
    if (written == 0) errno = EIO;  // no progress and no error: asked again it could go on for ever
    if (written <= 0) fail("write");
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void OutputFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  check_whole();
  while (!bytes.empty()) {
    const ssize_t written = uninterrupted([&] {
      return ::pwrite(file_, bytes.data(), std::min(bytes.size(), kLargestWrite), static_cast<off_t>(offset));
    });
    if (written == 0) errno = EIO;  // as above
    if (written <= 0) fail("write");
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void OutputFile::sync() {
  check_whole();
  if (uninterrupted([&] { return ::fsync(file_); }) == 0) return;
  struct stat status{};
  const int code = errno;
  const bool cannot_be_synced = code == EINVAL && ::fstat(file_, &status) == 0 && !S_ISREG(status.st_mode);
  errno = code;
  if (!cannot_be_synced) fail("sync");
}

void OutputFile::close() {
  check_whole();
  // Whatever close returns, Linux has released the number; closing again could close another's file.
  if (::close(std::exchange(file_, -1)) != 0 && errno != EINTR) fail("close");
}

std::string folder_name(const std::filesystem::path& folder) {
  const auto whole = std::filesystem::absolute(folder).lexically_normal();
  const auto name = whole.has_filename() ? whole.filename() : whole.parent_path().filename();
  return name.empty() ? whole.string() : name.string();
}

bool is_stream(const std::filesystem::path& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0 || S_ISDIR(status.st_mode)) return false;
  if (!S_ISREG(status.st_mode)) return true;
  // /dev/stdout is a link to /proc/self/fd/1, also where that is redirected into a regular file.
  std::error_code no_link;
  return std::filesystem::read_symlink(path, no_link).native().starts_with("/proc/");
}

DurableFile::DurableFile(const std::filesystem::path& path)
    : path_(path),
      streamed_(is_stream(path)),
      file_(streamed_ ? OutputFile::into_stream(path) : open_aside(path)) {}

DurableFile::~DurableFile() {
  if (!streamed_ && !renamed_) ::unlink(file_.path().c_str());
}

void DurableFile::commit() {
  file_.sync();
  file_.close();
  if (streamed_) return;
  if (::rename(file_.path().c_str(), path_.c_str()) != 0) throw_file_error("rename into place", path_);
  renamed_ = true;
  sync_folder(folder_of(path_));
}

void write_durably(const std::filesystem::path& path, std::string_view text) {
  DurableFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

void replace_file(const std::filesystem::path& path, std::string_view text) {
  OutputFile file = open_aside(path);
  try {
    file.write(text);
    file.close();
    if (::rename(file.path().c_str(), path.c_str()) != 0) throw_file_error("rename into place", path);
  } catch (const FileError&) {
    ::unlink(file.path().c_str());
    throw;
  }
}

void remove_asides(const std::filesystem::path& folder, const std::vector<std::string>& names) {
  constexpr size_t kDigits = 16;
  std::error_code unknown;  // no such folder: nothing to remove
  for (const auto& entry : std::filesystem::directory_iterator(folder, unknown)) {
    const std::string name = entry.path().filename().string();
    const size_t at = name.rfind(kAside);
    if (at == std::string::npos || name.size() != at + sizeof kAside - 1 + kDigits) continue;
    if (!names.empty() && std::find(names.begin(), names.end(), name.substr(0, at)) == names.end()) continue;
    if (entry.is_regular_file(unknown)) ::unlink(entry.path().c_str());
  }
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

void make_folder(const std::filesystem::path& path) {
  if (::mkdir(path.c_str(), 0755) != 0) throw_file_error("make the folder", path);
}

void make_folders(const std::filesystem::path& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) {
    if (!S_ISDIR(status.st_mode))
      throw FileError(path.string() + ": is a file, where a folder was expected. Choose another name.",
                      ENOTDIR);
    sync_parent(path);
    return;
  }
  if (errno != ENOENT) throw_file_error("look at", path);
  make_folders(folder_of(path));
  // Another process may make the same one at the same moment.
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) throw_file_error("make the folder", path);
  sync_folder(folder_of(path));
}

}  // namespace halfstep::files
