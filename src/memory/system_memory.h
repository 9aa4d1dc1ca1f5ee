// How much memory this process may use, and how much of it is still there.
#pragma once

#include <cstddef>
#include <string>

namespace halfstep {

struct SystemMemory {
  std::size_t limit_bytes = 0;      // the machine's memory, or the least that a cgroup above us allows
  std::size_t available_bytes = 0;  // before somebody is refused, or killed

  friend bool operator==(const SystemMemory&, const SystemMemory&) = default;
};

/// Reads /proc and /sys/fs/cgroup (both versions) below `root`; some 100 us. What cannot be read limits
/// nothing.
SystemMemory system_memory(const std::string& root = "");

}  // namespace halfstep
