#include "memory/address_range.h"

#include <halfstep/error.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace halfstep {
namespace {

/// Where addresses are limited, half of them are left to everybody else.
std::size_t at_most_half_of_the_limit(std::size_t wanted_bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted_bytes;
  return std::min(wanted_bytes, static_cast<std::size_t>(limit.rlim_cur) / 2);
}

}  // namespace

AddressRange::AddressRange(std::size_t wanted_bytes) {
  constexpr std::size_t kFewest = std::size_t{1} << 20;
  std::size_t bytes = std::max(kFewest, at_most_half_of_the_limit(wanted_bytes) / kPageBytes * kPageBytes);
  for (; bytes >= kFewest; bytes = bytes / 2 / kPageBytes * kPageBytes) {
    void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    begin_ = static_cast<std::byte*>(range);
    reserved_bytes_ = bytes;
    return;
  }
  HALFSTEP_CHECK(false, "CPU allocator: the system reserves not even ", kFewest, " bytes of addresses (",
                 std::strerror(errno), "). Raise `ulimit -v`, or do not install the allocator.");
}

AddressRange::~AddressRange() { munmap(begin_, reserved_bytes_); }

bool AddressRange::extend(std::size_t bytes) {
  if (bytes > reserved_bytes_ - usable_bytes_) return false;
  if (mprotect(begin_ + usable_bytes_, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  usable_bytes_ += bytes;
  return true;
}

bool AddressRange::give_back(std::byte* first, std::byte* last) {
  return madvise(first, static_cast<std::size_t>(last - first), MADV_DONTNEED) == 0;
}

}  // namespace halfstep
