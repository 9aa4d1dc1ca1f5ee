// Loaded before the C library (LD_PRELOAD): system calls on some files fail, as on a disk that fills up.
//
//   HALFSTEP_FAULT=write:tensors.safetensors:1-3:ENOSPC   the first three writes to a file of that name
//   HALFSTEP_FAULT=fsync:log.jsonl:2-2:EIO
//
// The part of the path is looked for anywhere in the file's path; the calls of all threads are counted.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace {

struct Plan {
  std::string call, part;
  long first = 0, last = -1;
  int code = 0;
};

Plan parsed(const char* text) {
  Plan plan;
  char call[32] = "", part[256] = "", code[32] = "";
  if (text == nullptr ||
      std::sscanf(text, "%31[^:]:%255[^:]:%ld-%ld:%31s", call, part, &plan.first, &plan.last, code) != 5)
    return {};
  plan.call = call;
  plan.part = part;
  plan.code = std::string_view(code) == "ENOSPC" ? ENOSPC : std::string_view(code) == "EDQUOT" ? EDQUOT : EIO;
  return plan;
}

bool strikes(const char* call, int file) {
  static const Plan plan = parsed(std::getenv("HALFSTEP_FAULT"));
  static std::atomic<long> count = 0;
  if (plan.call != call) return false;
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = ::readlink(link, path, sizeof path - 1);
  if (length <= 0 ||
      std::string_view(path, static_cast<size_t>(length)).find(plan.part) == std::string_view::npos)
    return false;
  const long number = ++count;
  if (number < plan.first || number > plan.last) return false;
  errno = plan.code;
  return true;
}

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

ssize_t write(int file, const void* bytes, size_t count) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
  return strikes("write", file) ? -1 : real(file, bytes, count);
}

int fsync(int file) {
  static const auto real = next<int (*)(int)>("fsync");
  return strikes("fsync", file) ? -1 : real(file);
}
}
#pragma GCC visibility pop
