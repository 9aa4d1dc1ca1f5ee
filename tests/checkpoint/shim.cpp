#include "checkpoint/shim.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace halfstep::testing::shim {
namespace {

struct State {
  Plan plan;
  std::vector<Call> calls;
  std::vector<Event> events;
  struct Open {
    std::string path;
    uint64_t offset = 0;
    bool folder = false;
  };
  std::map<int, Open> files;
  bool watching = false;
  bool disk_full = false;
};

/// Checkpoints are written by a thread of their own.
std::unique_lock<std::recursive_mutex> alone() {
  static std::recursive_mutex mutex;
  return std::unique_lock(mutex);
}

State& state() {
  static State the_state;
  return the_state;
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

bool watched(std::string_view path) { return state().watching && path.starts_with(state().plan.folder); }

// The path that the call is made with: without the prefix that the sabotage drops.
std::string real_path(const char* path) {
  std::string real = path;
  const std::string& prefix = state().plan.dropped_prefix;
  if (!watched(real) || prefix.empty()) return real;
  if (const size_t at = real.find("/" + prefix); at != std::string::npos) real.erase(at + 1, prefix.size());
  return real;
}

void record(Event event) {
  if (state().plan.record) state().events.push_back(std::move(event));
}

/// Runs one watched call: `real` makes it, `half` makes half of a write.
template <typename Real, typename Half>
long watch(Call call, Real real, Half half) {
  State& s = state();
  const int64_t number = static_cast<int64_t>(s.calls.size());
  s.calls.push_back(call);
  if (s.disk_full && (call == Call::Write || call == Call::Fsync)) {
    errno = s.plan.code;
    return -1;
  }
  if (number != s.plan.at) return real();
  switch (s.plan.fault) {
    case Fault::None:
      return real();
    case Fault::KillBefore:
      die();
    case Fault::KillAfter:
      real();
      die();
    case Fault::KillMidway:
      half();
      die();
    case Fault::Fail:
      if (call == Call::Close) real();
      errno = s.plan.code;
      return -1;
    case Fault::FailMidway:
      s.disk_full = true;
      return half();
    case Fault::ShortWrite:
      return half();
  }
  return real();
}

template <typename Real>
long watch(Call call, Real real) {
  return watch(call, real, real);
}

long do_write(int file, const void* bytes, size_t count) {
  const long written = ::syscall(SYS_write, file, bytes, count);
  State::Open& open = state().files[file];
  if (written > 0) {
    const auto* first = static_cast<const std::byte*>(bytes);
    record({.kind = Event::Kind::Write,
            .path = open.path,
            .offset = open.offset,
            .bytes = {first, first + written}});
    open.offset += static_cast<uint64_t>(written);
  }
  return written;
}

long do_open(const char* path, int flags, unsigned mode) {
  const std::string real = real_path(path);
  const bool is_new = ::syscall(SYS_faccessat, AT_FDCWD, real.c_str(), F_OK) != 0;
  errno = 0;
  const long file = ::syscall(SYS_openat, AT_FDCWD, real.c_str(), flags, mode);
  if (file < 0) return file;
  state().files[static_cast<int>(file)] = {.path = real, .folder = (flags & O_DIRECTORY) != 0};
  if (is_new) record({.kind = Event::Kind::Create, .path = real});
  return file;
}

long do_fsync(int file) {
  const State::Open& open = state().files[file];
  if (open.folder ? state().plan.no_folder_sync : state().plan.no_file_sync) return 0;
  const long result = ::syscall(SYS_fsync, file);
  record({.kind = open.folder ? Event::Kind::SyncFolder : Event::Kind::SyncFile, .path = open.path});
  return result;
}

long do_rename(const char* from, const char* to) {
  const std::string real_from = real_path(from), real_to = real_path(to);
  if (real_from == real_to) return 0;
  const long result = ::syscall(SYS_renameat, AT_FDCWD, real_from.c_str(), AT_FDCWD, real_to.c_str());
  if (result == 0) record({.kind = Event::Kind::Rename, .path = real_from, .to = real_to});
  return result;
}

long do_path_call(Event::Kind kind, const char* path, long number, unsigned argument) {
  const std::string real = real_path(path);
  const long result = ::syscall(number, AT_FDCWD, real.c_str(), argument);
  if (result == 0) record({.kind = kind, .path = real});
  return result;
}

bool watched(int file) { return state().watching && state().files.contains(file); }

}  // namespace

void begin(Plan plan) {
  state() = {};
  state().plan = std::move(plan);
  state().watching = true;
}

std::vector<Call> end() {
  state().watching = false;
  return std::exchange(state().calls, {});
}

std::vector<Event> take_events() { return std::exchange(state().events, {}); }

void note_saved(int64_t step) { record({.kind = Event::Kind::Saved, .offset = static_cast<uint64_t>(step)}); }

}  // namespace halfstep::testing::shim

using namespace halfstep::testing::shim;

extern "C" {

int open(const char* path, int flags, ...) {
  const auto lock = alone();
  va_list rest;
  va_start(rest, flags);
  const unsigned mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, unsigned) : 0;
  va_end(rest);
  if (!watched(std::string_view(path)))
    return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  return static_cast<int>(watch(Call::Open, [&] { return do_open(path, flags, mode); }));
}

ssize_t write(int file, const void* bytes, size_t count) {
  const auto lock = alone();
  if (!watched(file)) return ::syscall(SYS_write, file, bytes, count);
  return watch(
      Call::Write, [&] { return do_write(file, bytes, count); },
      [&] { return do_write(file, bytes, (count + 1) / 2); });
}

ssize_t pwrite(int file, const void* bytes, size_t count, off_t offset) {
  const auto lock = alone();
  if (!watched(file)) return ::syscall(SYS_pwrite64, file, bytes, count, offset);
  return watch(Call::Write, [&] {
    const long written = ::syscall(SYS_pwrite64, file, bytes, count, offset);
    const auto* first = static_cast<const std::byte*>(bytes);
    if (written > 0)
      record({.kind = Event::Kind::Write,
              .path = state().files[file].path,
              .offset = static_cast<uint64_t>(offset),
              .bytes = {first, first + written}});
    return written;
  });
}

int fsync(int file) {
  const auto lock = alone();
  if (!watched(file)) return static_cast<int>(::syscall(SYS_fsync, file));
  return static_cast<int>(watch(Call::Fsync, [&] { return do_fsync(file); }));
}

int close(int file) {
  const auto lock = alone();
  if (!watched(file)) return static_cast<int>(::syscall(SYS_close, file));
  return static_cast<int>(watch(Call::Close, [&] {
    state().files.erase(file);
    return ::syscall(SYS_close, file);
  }));
}

int rename(const char* from, const char* to) noexcept {
  const auto lock = alone();
  if (!watched(std::string_view(from)))
    return static_cast<int>(::syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to));
  return static_cast<int>(watch(Call::Rename, [&] { return do_rename(from, to); }));
}

int unlink(const char* path) noexcept {
  const auto lock = alone();
  if (!watched(std::string_view(path))) return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
  return static_cast<int>(
      watch(Call::Unlink, [&] { return do_path_call(Event::Kind::Unlink, path, SYS_unlinkat, 0); }));
}

int rmdir(const char* path) noexcept {
  const auto lock = alone();
  if (!watched(std::string_view(path)))
    return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR));
  return static_cast<int>(
      watch(Call::Rmdir, [&] { return do_path_call(Event::Kind::Rmdir, path, SYS_unlinkat, AT_REMOVEDIR); }));
}

int mkdir(const char* path, mode_t mode) noexcept {
  const auto lock = alone();
  if (!watched(std::string_view(path))) return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
  return static_cast<int>(
      watch(Call::Mkdir, [&] { return do_path_call(Event::Kind::Mkdir, path, SYS_mkdirat, mode); }));
}

int flock(int file, int operation) noexcept {
  const auto lock = alone();
  if (!watched(file)) return static_cast<int>(::syscall(SYS_flock, file, operation));
  return static_cast<int>(watch(Call::Flock, [&] { return ::syscall(SYS_flock, file, operation); }));
}

int ftruncate(int file, off_t size) noexcept {
  const auto lock = alone();
  if (!watched(file)) return static_cast<int>(::syscall(SYS_ftruncate, file, size));
  return static_cast<int>(watch(Call::Truncate, [&] {
    const long result = ::syscall(SYS_ftruncate, file, size);
    if (result == 0)
      record({.kind = Event::Kind::Truncate,
              .path = state().files[file].path,
              .offset = static_cast<uint64_t>(size)});
    return result;
  }));
}
}
